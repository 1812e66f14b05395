// The forward of a call of the op family: one native call on a CPU and for Hopper's products, else
// passes over rows around PyTorch's products.

#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "folds.h"
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

// The products of normalized rows and each weight, or all side by side in one tensor.
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
      products.push_back(shaped(at::linear(rows, t.weight(i), t.bias(i))));
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

// Whether to ask an extension's own product: on a GPU only where nothing else comes with the norm.
// There it finds statistics on its way sooner than a pass applies given ones.
inline bool has_product(
    const Seam& kind, const Operands& t, const Sizes& sizes, const Kernels& kernels) {
  if (!kernels.product.forward || kind.returns_norm) return false;
  if (t[X].is_cpu()) return t.count() == 1 && !t[RSTD].defined();
  return t.is_bare() &&
      (t.count() == 1 || are_apart(kind, t) ||
       (kind.is_gated() && kind.is_joined && t.is_pair()));
}

// Computes up to the activation, or past it, in one native call; false where the plan declines.
inline bool forward_by_product(
    const Seam& kind, const Operands& t, const Sizes& sizes, bool keeps, Keeping keeping,
    const Kernels& kernels, bool activates, Results& results) {
  const Tensor& x = t[X];
  const bool keeps_h = activates && keeps && !kind.recompute;
  auto call = norm_call(kind, t, sizes, kernels.product.context);
  call.N = activates && kind.is_gated() ? sizes.N / 2 : sizes.N;
  call.activation = activates ? kind.activation : 0;
  call.weight = address(t.weight(0));
  call.bias = address(t.bias(0));
  if (call.activation && kind.is_gated()) {
    const bool is_pair = t.count() == 2;
    const auto size = static_cast<int64_t>(x.element_size()) * call.N;
    const auto after = [](void* start, int64_t bytes) -> void* {
      return start ? static_cast<char*>(start) + bytes : nullptr;
    };
    call.up = is_pair ? address(t.weight(1)) : after(call.weight, size * sizes.K);
    call.up_bias = is_pair ? address(t.bias(1)) : after(call.bias, size);
  }
  call.sum = address(results.sum);
  call.mean = address(results.mean);
  call.rstd = address(results.rstd);
  call.h = keeps_h ? WANTED : nullptr;
  call.may_keep = keeping.is_allowed;
  call.way = kernels.product.way;
  std::optional<Parts> parts;
  if (are_apart(kind, t)) parts.emplace(call, t);
  if (kernels.product.plan_forward(&call) != 0) return false;
  std::optional<Fold> fold;
  if (call.way == KEPT_FOLD) {
    fold = kept_fold(kind, t, call, keeping.promise);
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
  const auto workspace = scratch_of(call, x);
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
    const Seam& kind, const Operands& t, const Sizes& sizes, bool keeps, Keeping keeping,
    const Kernels& kernels, Results& results) {
  const auto run = [&](bool activates) {
    return forward_by_product(kind, t, sizes, keeps, keeping, kernels, activates, results);
  };
  if (kind.activation && run(true)) return true;
  const bool is_apart = t.count() == 1 || are_apart(kind, t);
  return !(kind.activation && t[X].is_cpu()) && is_apart && run(false);
}

// y = a W^T + b + residual.
inline Tensor second_linear(const Operands& t, const Tensor& a, const Kernels& kernels) {
  const Tensor &weight = t[OUT_WEIGHT], &bias = t[OUT_BIAS], &residual = t[OUT_RESIDUAL];
  if (residual.defined() && kernels.product.linear_add) {
    Call call{};
    call.N = weight.size(0);
    call.K = weight.size(1);
    call.M = a.numel() / call.K;
    call.context = kernels.product.context;
    call.x = address(a);
    call.weight = address(weight);
    call.bias = address(bias);
    call.residual = address(residual);
    if (kernels.product.plan_linear_add(&call) == 0 && call.way == FUSED) {
      const auto y = empty(residual.sizes(), residual);
      call.y = address(y);
      launch(kernels.product.linear_add, call, a);
      return y;
    }
  }
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
    const Seam& kind, const Operands& t, const Sizes& sizes, bool keeps, Keeping keeping,
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
      !forward_by_product(kind, t, sizes, keeps, keeping, kernels, results)) {
    auto z = normalized(kind, t, sizes, kernels.passes, &results);
    auto products = products_of(kind, z, t, sizes, kernels.product);
    if (kind.returns_norm) results.norm = z;
    // The activation may have its memory.
    z.reset();
    const bool stay = keeps && kind.activation && !kind.recompute;
    for (const auto& h : products) {
      results.outputs.push_back(activated(kind, h, kernels.passes, !stay));
    }
    if (stay) results.products = std::move(products);
  }
  if (t[OUT_WEIGHT].defined()) results.outputs[0] = second_linear(t, results.outputs[0], kernels);
  return results;
}

}  // namespace fused_norm
