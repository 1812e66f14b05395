// The forward of a call of the op family: one native call on a CPU and for Hopper's products,
// otherwise passes over rows around products.

#pragma once

#include "choice.h"
#include "folds.h"
#include "grouped.h"

namespace fused_norm {

// What a call returns, and what its backward needs.
struct Results {
  Tensors outputs;
  Tensor sum, norm, mean, rstd;
  Tensors products;
};

// The activation of a product. On a CPU it may overwrite the product: fresh memory costs a page
// fault for every 4 KiB, and cache lines that are read anyway cost less to write.
inline Tensor activated(
    const Spec& spec, const Tensor& h, const Kernels& kernels, bool may_replace = false) {
  if (!spec.activation) return h;
  const int64_t N = h.size(-1) / (spec.is_gated() ? 2 : 1);
  const auto a = may_replace && !spec.is_gated() && h.is_cpu() ? h : empty_rows(h, N);
  auto call = rows_call(h.numel() / h.size(-1), N, kernels.passes.context);
  call.activation = spec.activation;
  call.h = address(h);
  call.a = address(a);
  launch(kernels.passes.activate, call, h);
  return a;
}

// The products of newly normalized rows and each weight, or all concatenated in one tensor.
inline Tensors products_of(
    const Spec& spec, const Tensor& z, const Operands& t, const Extent& extent,
    const Kernels& kernels) {
  auto products = grouped_products(spec, z, t, extent, kernels);
  if (!products.empty()) return products;
  const auto rows = z.rows();
  const bool is_joined = spec.is_joined && t.count() > 1;
  if (is_joined) products.push_back(empty_rows(z, extent.N));
  int64_t first = 0;
  for (size_t i = 0; i < t.count(); ++i) {
    const Tensor &weight = t.weight(i), &bias = t.bias(i);
    const auto N = weight.size(0);
    const Tensor part = is_joined ? products[0].rows().narrowed(first, N) : Tensor();
    first += N;
    if (spec.invariant) {
      const auto y = invariant_linear(z, weight, bias, {}, kernels);
      if (!is_joined) {
        products.push_back(y);
      } else {
        copy(part, y.rows());
      }
      continue;
    }
    if (is_joined) {
      linear_by_pytorch(part, rows, weight, bias);
      continue;
    }
    auto call = linear_call(z, weight, bias, kernels.product);
    call.z = address(z);
    auto y = linear_by_kernel(call, z, weight, kernels.product);
    if (!y.defined()) {
      y = empty_rows(z, N);
      linear_by_pytorch(y.rows(), rows, weight, bias);
    }
    products.push_back(y);
  }
  return products;
}

// Gives a record the weights, the halves of a gate separately, and where their product goes.
inline void give_weights(
    Call& call, const Spec& spec, const Operands& t, const Extent& extent, bool activates) {
  call.N = activates && spec.is_gated() ? extent.N / 2 : extent.N;
  call.activation = activates ? spec.activation : 0;
  call.weight = address(t.weight(0));
  call.bias = address(t.bias(0));
  if (!call.activation || !spec.is_gated()) return;
  const bool is_pair = t.count() == 2;
  const auto size = t.weight(0).element_size() * call.N;
  const auto after = [](void* start, int64_t bytes) -> void* {
    return start ? static_cast<char*>(start) + bytes : nullptr;
  };
  call.up = is_pair ? address(t.weight(1)) : after(call.weight, size * extent.K);
  call.up_bias = is_pair ? address(t.bias(1)) : after(call.bias, size);
}

// Computes the output with a product of newly normalized rows that activates in its epilogue; false
// if a pass has to follow.
inline bool activated_by_product(
    const Spec& spec, const Tensor& z, const Operands& t, const Extent& extent, bool keeps_h,
    const Kernels& kernels, Results& results) {
  const auto& product = kernels.product;
  const bool is_one = t.count() == 1 || (spec.is_gated() && spec.is_joined && t.is_pair());
  if (!spec.activation || !is_one || !product.linear || spec.invariant || !t.are_weights_dense()) {
    return false;
  }
  auto call = rows_call(extent.M, extent.N, product.context);
  call.K = extent.K;
  call.z = address(z);
  give_weights(call, spec, t, extent, true);
  call.h = keeps_h ? WANTED : nullptr;
  if (product.plan_linear(&call) != 0 || call.strategy != FUSED) return false;
  results.outputs.push_back(empty_rows(z, call.N));
  call.y = address(results.outputs[0]);
  if (keeps_h) {
    results.products.push_back(empty_rows(z, extent.N));
    call.h = address(results.products[0]);
  }
  launch(product.linear, call, z);
  return true;
}

// Normalizes rows, whose statistics may be given or wanted.
inline Tensor normalized(
    const Spec& spec, const Operands& t, const Extent& extent, const Kernels& kernels,
    Results* results = nullptr) {
  auto call = norm_call(spec, t, extent, kernels.norm_passes.context);
  const auto z = empty(t[X].sizes(), t[X], t.product_dtype());
  call.z = address(z);
  call.has_statistics = t[RSTD].defined();
  if (results) {
    call.sum = address(results->sum);
    if (!call.has_statistics) {
      call.mean = address(results->mean);
      call.rstd = address(results->rstd);
    }
  }
  run(kernels.norm_passes.plan_normalize, kernels.norm_passes.normalize, call, t[X]);
  return z;
}

// Whether each of several weights has a separate output, and nothing follows.
inline bool has_own_outputs(const Spec& spec, const Operands& t) {
  return is_grouped(t) && !spec.is_joined && !spec.activation;
}

// Whether one native call may normalize and multiply. GPU kernels take no modulation of x.
inline bool may_fuse(const Spec& spec, const Operands& t, const Kernels& kernels) {
  if (!kernels.product.forward || spec.returns_norm || t.is_narrow() || !t.are_weights_dense()) {
    return false;
  }
  if (t[X].is_cpu()) return t.count() == 1 && !t[RSTD].defined();
  return !spec.invariant && !t.has(Form::GROUPS) && !(t.has_sum() && t[RSTD].defined()) &&
      (t.count() == 1 || has_own_outputs(spec, t) ||
       (spec.is_gated() && spec.is_joined && t.is_pair()));
}

// The record of a native call up to the activation, or past it, with its plan made. Results have
// their addresses, or WANTED.
inline Call planned_forward(
    const Spec& spec, const Operands& t, const Extent& extent, const Results& results,
    bool keeps_h, const Fold& fold, const Kernels& kernels, bool activates, Group& parts) {
  const auto& product = kernels.product;
  auto call = norm_call(spec, t, extent, product.context);
  give_weights(call, spec, t, extent, activates);
  call.in_graph = kernels.is_captured;
  call.sum = address(results.sum);
  call.has_statistics = t[RSTD].defined();
  if (!call.has_statistics) {
    call.mean = address(results.mean);
    call.rstd = address(results.rstd);
  }
  call.h = activates && keeps_h ? WANTED : nullptr;
  if (has_own_outputs(spec, t)) parts.give(call, t);
  call.may_keep = fold.is_for(call.activation);
  call.strategy = !call.may_keep ? product.strategy : fold.is_needed ? int64_t{KEPT_FOLD} : product.kept_strategy;
  if (t[X].is_cpu() && !call.strategy && !spec.invariant) {
    call.strategy = Costs(product.costs).fastest(call, extent.N, call.rstd != nullptr);
  }
  if (call.strategy == AROUND_PRODUCTS && t[X].is_cpu()) return call;
  if (product.plan_forward(&call) != 0) call.strategy = DECLINED;
  return call;
}

inline bool is_fused(const Call& call) {
  return call.strategy == FUSED || call.strategy == KEPT_FOLD || call.strategy == NEW_FOLD;
}

// The activation in the product's epilogue that a fold would be made for; -1 if the plan wants
// no fold.
inline int64_t wanted_fold(
    const Spec& spec, const Operands& t, const Extent& extent, const Kernels& kernels) {
  if (!may_fuse(spec, t, kernels)) return -1;
  Results results;
  if (t.has_sum()) results.sum = t[X];
  for (const bool activates : {true, false}) {
    if (activates && !spec.activation) continue;
    if (!activates && t.count() > 1 && !has_own_outputs(spec, t)) continue;
    Group parts;
    Fold any;
    any.activation = activates ? spec.activation : 0;
    const auto call =
        planned_forward(spec, t, extent, results, false, any, kernels, activates, parts);
    if (call.strategy == KEPT_FOLD) return call.activation;
    if (is_fused(call)) return -1;
  }
  return -1;
}

// The fold of a call, if it has one; nothing if Python has to look. A call whose plan wants none,
// like most calls of a frozen model, does not ask.
inline std::optional<Fold> fold_for(
    const Spec& spec, const Operands& t, const Extent& extent, bool keeps, const Kernels& kernels) {
  auto fold = fold_of(spec, t, keeps, kernels.is_captured);
  // Values may have left the device: Python knows.
  const bool may_skip = !fold && frozen_level == 1;
  if (may_skip && wanted_fold(spec, t, extent, kernels) < 0) return Fold();
  return fold;
}

// Computes up to the activation, or past it, in one native call; false if the plan declines.
inline bool forward_by_product(
    const Spec& spec, const Operands& t, const Extent& extent, bool keeps, const Fold& fold,
    const Kernels& kernels, bool activates, Results& results) {
  const Tensor& x = t[X];
  const bool keeps_h = keeps && !spec.recompute;
  Group parts;
  auto call =
      planned_forward(spec, t, extent, results, keeps_h, fold, kernels, activates, parts);
  // Another strategy would read placeholders for values that are elsewhere.
  if (!is_fused(call) || (fold.is_needed && call.strategy != KEPT_FOLD)) return false;
  if (call.strategy == KEPT_FOLD) fold.give(call);
  Tensors outputs;
  for (int64_t i = 0; i < call.part_count; ++i) {
    const auto place = static_cast<size_t>(i);
    outputs.push_back(empty_rows(x, t.weight(place).size(0)));
    parts[place].y = address(outputs.back());
  }
  if (!call.part_count) outputs.push_back(empty_rows(x, call.N));
  call.y = address(outputs[0]);
  if (call.h) {
    results.products.push_back(empty_rows(x, extent.N));
    call.h = address(results.products[0]);
  }
  const auto workspace = workspace_of(call, x);
  launch(kernels.product.forward, call, x);
  if (activates || !spec.activation) {
    results.outputs = std::move(outputs);
  } else {
    results.outputs.push_back(activated(spec, outputs[0], kernels, !keeps_h));
    if (keeps_h) results.products.push_back(outputs[0]);
  }
  return true;
}

// With either strategy: the product may not support the activation in its epilogue.
inline bool forward_by_product(
    const Spec& spec, const Operands& t, const Extent& extent, bool keeps, const Fold& fold,
    const Kernels& kernels, Results& results) {
  if (!may_fuse(spec, t, kernels)) return false;
  const auto run = [&](bool activates) {
    return forward_by_product(spec, t, extent, keeps, fold, kernels, activates, results);
  };
  if (spec.activation && run(true)) return true;
  const bool is_separate = t.count() == 1 || has_own_outputs(spec, t);
  return !(spec.activation && t[X].is_cpu()) && is_separate && run(false);
}

// A call with aligned rows: passes read rows in another order otherwise.
inline Operands with_aligned_rows(const Operands& t) {
  Operands ready = t;
  for (const Place place : {X, RESIDUAL}) ready.flat[place] = aligned(t[place]);
  return ready;
}

// Computes a call.
inline Results forward(
    const Spec& spec, const Operands& t, const Extent& extent, bool keeps, const Fold& fold,
    const Kernels& kernels) {
  const Tensor& x = t[X];
  Results results;
  if (keeps && !t[RSTD].defined()) {
    const auto wide = statistics_dtype(x.dtype());
    const auto rows = x.sizes().first(static_cast<size_t>(x.dim()) - 1);
    if (has_mean(spec)) results.mean = empty(rows, x, wide);
    results.rstd = empty(rows, x, wide);
  }
  if (t.has_sum()) results.sum = empty_like(x);
  if (!forward_by_product(spec, t, extent, keeps, fold, kernels, results)) {
    if (fold.is_needed) {
      throw std::runtime_error(
          "freeze(offload=True) moved a weight of this call to the host's memory, and the call "
          "needs it: run it under torch.no_grad() as the calls before, or unfreeze the model");
    }
    auto z = normalized(
        spec, spec.invariant ? with_aligned_rows(t) : t, extent, kernels, &results);
    const bool keeps_h = keeps && spec.activation && !spec.recompute;
    if (spec.returns_norm) results.norm = z;
    if (!activated_by_product(spec, z, t, extent, keeps_h, kernels, results)) {
      auto products = products_of(spec, z, t, extent, kernels);
      // The activation may reuse its memory.
      z = Tensor();
      for (const auto& h : products) {
        results.outputs.push_back(activated(spec, h, kernels, !keeps_h));
      }
      if (keeps_h) results.products = std::move(products);
    }
  }
  if (t[OUT_WEIGHT].defined()) {
    results.outputs[0] = linear_add(
        results.outputs[0], t[OUT_WEIGHT], t[OUT_BIAS], t[OUT_RESIDUAL], spec.invariant, kernels);
  }
  if (!keeps && !spec.returns_sum) results.sum = Tensor();
  return results;
}

}  // namespace fused_norm
