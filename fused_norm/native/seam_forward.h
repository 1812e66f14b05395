// The forward of a call of the op family: one native call on a CPU and for Hopper's products, else
// passes over rows around PyTorch's products.

#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>

#include "folds.h"
#include "linear.h"
#include "several.h"

namespace fused_norm {

// What a call returns, and what its backward needs.
struct Results {
  Tensors outputs;
  Tensor sum, norm, mean, rstd;
  Tensors products;
};

// The activation of a product. On a CPU it may take the product's place: fresh memory costs a page
// fault for every 4 KiB, and lines that are read anyway cost less to write.
inline Tensor activated(
    const Seam& kind, const Tensor& h, const Passes& passes, bool may_replace = false) {
  if (!kind.activation) return h;
  const int64_t N = h.size(-1) / (kind.is_gated() ? 2 : 1);
  const auto a = may_replace && !kind.is_gated() && h.is_cpu() ? h : empty_rows(h, N);
  auto call = rows_call(h.numel() / h.size(-1), N, passes.context);
  call.activation = kind.activation;
  call.h = address(h);
  call.a = address(a);
  launch(passes.activate, call, h);
  return a;
}

// The products of rows just normalized and each weight, or all side by side in one tensor.
inline Tensors products_of(
    const Seam& kind, const Tensor& z, const Operands& t, const Sizes& sizes,
    const Product& product) {
  auto products = several_products(kind, z, t, sizes, product);
  if (!products.empty()) return products;
  const auto rows = as_rows(z);
  const auto shaped = [&](const Tensor& product) {
    if (z.dim() == 2) return product;
    c10::DimVector shape(z.sizes().begin(), z.sizes().end());
    shape.back() = product.size(1);
    return product.view(shape);
  };
  if (!kind.is_joined || t.count() == 1) {
    for (size_t i = 0; i < t.count(); ++i) {
      auto call = linear_call(rows, t.weight(i), t.bias(i), product);
      call.z = address(rows);
      const auto y = linear_by_kernel(call, rows, product);
      products.push_back(shaped(y.defined() ? y : at::linear(rows, t.weight(i), t.bias(i))));
    }
    return products;
  }
  const auto joined = empty({rows.size(0), sizes.N}, z);
  int64_t first = 0;
  for (size_t i = 0; i < t.count(); ++i) {
    auto part = joined.narrow(1, first, t.weight(i).size(0));
    first += t.weight(i).size(0);
    if (t.bias(i).defined()) {
      at::addmm_out(part, t.bias(i), rows, t.weight(i).t());
    } else {
      at::mm_out(part, rows, t.weight(i).t());
    }
  }
  products.push_back(shaped(joined));
  return products;
}

// Gives a record the weights, those of a gate's halves apart, and what becomes of their product.
inline void give_weights(
    Call& call, const Seam& kind, const Operands& t, const Sizes& sizes, bool activates) {
  call.N = activates && kind.is_gated() ? sizes.N / 2 : sizes.N;
  call.activation = activates ? kind.activation : 0;
  call.weight = address(t.weight(0));
  call.bias = address(t.bias(0));
  if (!call.activation || !kind.is_gated()) return;
  const bool is_pair = t.count() == 2;
  const auto size = static_cast<int64_t>(t.weight(0).element_size()) * call.N;
  const auto after = [](void* start, int64_t bytes) -> void* {
    return start ? static_cast<char*>(start) + bytes : nullptr;
  };
  call.up = is_pair ? address(t.weight(1)) : after(call.weight, size * sizes.K);
  call.up_bias = is_pair ? address(t.bias(1)) : after(call.bias, size);
}

// Finds the output by the product of rows just normalized, whose epilogue activates; false where a
// pass is to follow.
inline bool activated_by_product(
    const Seam& kind, const Tensor& z, const Operands& t, const Sizes& sizes, bool keeps_h,
    const Product& product, Results& results) {
  const bool is_one = t.count() == 1 || (kind.is_gated() && kind.is_joined && t.is_pair());
  if (!kind.activation || !is_one || !product.linear) return false;
  auto call = rows_call(sizes.M, sizes.N, product.context);
  call.K = sizes.K;
  call.z = address(z);
  give_weights(call, kind, t, sizes, true);
  call.h = keeps_h ? WANTED : nullptr;
  if (product.plan_linear(&call) != 0 || call.way != FUSED) return false;
  results.outputs.push_back(empty_rows(z, call.N));
  call.y = address(results.outputs[0]);
  if (keeps_h) {
    results.products.push_back(empty_rows(z, sizes.N));
    call.h = address(results.products[0]);
  }
  launch(product.linear, call, z);
  return true;
}

// Normalizes rows, whose statistics may be given or wanted.
inline Tensor normalized(
    const Seam& kind, const Operands& t, const Sizes& sizes, const Passes& passes,
    Results* results = nullptr) {
  auto call = norm_call(kind, t, sizes, passes.context);
  const auto z = empty(t[X].sizes(), t[X]);
  call.z = address(z);
  call.has_statistics = t[RSTD].defined();
  if (results) {
    call.sum = address(results->sum);
    if (!call.has_statistics) {
      call.mean = address(results->mean);
      call.rstd = address(results->rstd);
    }
  }
  run(passes.plan_normalize, passes.normalize, call, t[X]);
  return z;
}

// Whether each of several weights has an output of its own, and nothing follows.
inline bool are_apart(const Seam& kind, const Operands& t) {
  return are_several(t) && !kind.is_joined && !kind.activation;
}

// Whether to ask an extension's own product. What modulates rows a GPU's has no place for.
inline bool has_product(
    const Seam& kind, const Operands& t, const Sizes& sizes, const Kernels& kernels) {
  if (!kernels.product.forward || kind.returns_norm) return false;
  if (t[X].is_cpu()) return t.count() == 1 && !t[RSTD].defined();
  return !t.has(Form::GROUPS) && !(t.has_sum() && t[RSTD].defined()) &&
      (t.count() == 1 || are_apart(kind, t) ||
       (kind.is_gated() && kind.is_joined && t.is_pair()));
}

// Computes up to the activation, or past it, in one native call; false where the plan declines.
inline bool forward_by_product(
    const Seam& kind, const Operands& t, const Sizes& sizes, bool keeps, bool may_fold,
    const Kernels& kernels, bool activates, Results& results) {
  const Tensor& x = t[X];
  const bool keeps_h = activates && keeps && !kind.recompute;
  auto call = norm_call(kind, t, sizes, kernels.product.context);
  give_weights(call, kind, t, sizes, activates);
  call.sum = address(results.sum);
  call.has_statistics = t[RSTD].defined();
  if (!call.has_statistics) {
    call.mean = address(results.mean);
    call.rstd = address(results.rstd);
  }
  call.h = keeps_h ? WANTED : nullptr;
  call.may_keep = may_fold;
  call.way = kernels.product.way;
  std::optional<Parts> parts;
  if (are_apart(kind, t)) parts.emplace(call, t);
  if (kernels.product.plan_forward(&call) != 0) return false;
  std::optional<Fold> fold;
  if (call.way == KEPT_FOLD) {
    fold = frozen_fold(kind, t, call);
    if (fold) {
      fold->give(call);
    } else {
      call.may_keep = call.way = 0;
      if (kernels.product.plan_forward(&call) != 0) return false;
    }
  }
  if (call.way == DECLINED) return false;
  Tensors outputs;
  for (size_t i = 0; parts && i < t.count(); ++i) {
    outputs.push_back(empty_rows(x, t.weight(i).size(0)));
    (*parts)[i].y = address(outputs.back());
  }
  if (!parts) outputs.push_back(empty_rows(x, call.N));
  call.y = address(outputs[0]);
  if (keeps_h) {
    results.products.push_back(empty_rows(x, sizes.N));
    call.h = address(results.products[0]);
  }
  const auto workspace = workspace_of(call, x);
  launch(kernels.product.forward, call, x);
  if (activates || !kind.activation) {
    results.outputs = std::move(outputs);
  } else {
    const bool stays = keeps && !kind.recompute;
    results.outputs.push_back(activated(kind, outputs[0], kernels.passes, !stays));
    if (stays) results.products.push_back(outputs[0]);
  }
  return true;
}

// The same either way: the product may have no place for the activation.
inline bool forward_by_product(
    const Seam& kind, const Operands& t, const Sizes& sizes, bool keeps, bool may_fold,
    const Kernels& kernels, Results& results) {
  const auto run = [&](bool activates) {
    return forward_by_product(kind, t, sizes, keeps, may_fold, kernels, activates, results);
  };
  if (kind.activation && run(true)) return true;
  const bool is_apart = t.count() == 1 || are_apart(kind, t);
  return !(kind.activation && t[X].is_cpu()) && is_apart && run(false);
}

// y = a W^T + b + residual.
inline Tensor second_linear(const Operands& t, const Tensor& a, const Kernels& kernels) {
  const Tensor &weight = t[OUT_WEIGHT], &bias = t[OUT_BIAS], &residual = t[OUT_RESIDUAL];
  auto call = linear_call(a, weight, bias, kernels.product);
  call.x = address(a);
  call.residual = address(residual);
  const auto ours = linear_by_kernel(call, a, kernels.product);
  if (ours.defined()) return ours;
  if (residual.defined() && !bias.defined()) {
    const auto y = at::addmm(as_rows(residual), as_rows(a), weight.t());
    return y.view(residual.sizes());
  }
  auto y = at::linear(a, weight, bias);
  if (residual.defined()) y.add_(residual);
  return y;
}

// Computes a call whose sizes are known.
inline Results forward(
    const Seam& kind, const Operands& t, const Sizes& sizes, bool keeps, bool may_fold,
    const Kernels& kernels) {
  const Tensor& x = t[X];
  Results results;
  if (keeps && !t[RSTD].defined()) {
    const auto wide = statistics_dtype(x.scalar_type());
    const auto shape = x.sizes().slice(0, x.dim() - 1);
    if (kind.has_mean()) results.mean = empty(shape, x, wide);
    results.rstd = empty(shape, x, wide);
  }
  if (t.has_sum()) results.sum = empty(x.sizes(), x);
  if (!has_product(kind, t, sizes, kernels) ||
      !forward_by_product(kind, t, sizes, keeps, may_fold, kernels, results)) {
    auto z = normalized(kind, t, sizes, kernels.passes, &results);
    const bool keeps_h = keeps && kind.activation && !kind.recompute;
    if (kind.returns_norm) results.norm = z;
    if (!activated_by_product(kind, z, t, sizes, keeps_h, kernels.product, results)) {
      auto products = products_of(kind, z, t, sizes, kernels.product);
      // The activation may have its memory.
      z.reset();
      for (const auto& h : products) {
        results.outputs.push_back(activated(kind, h, kernels.passes, !keeps_h));
      }
      if (keeps_h) results.products = std::move(products);
    }
  }
  if (t[OUT_WEIGHT].defined()) results.outputs[0] = second_linear(t, results.outputs[0], kernels);
  return results;
}

}  // namespace fused_norm
