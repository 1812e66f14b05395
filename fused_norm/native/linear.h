// A Linear layer by itself, on rows that a pass has normalized or on any, by Hopper's products:
// backends/linear.py in C++.

#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include "seam.h"

namespace fused_norm {

// rows W^T + b + residual, of dense rows and as a record says; undefined where PyTorch's product is
// faster, or what follows it.
inline Tensor linear_by_kernel(Call& call, const Tensor& rows, const Product& product) {
  if (!product.linear || product.plan_linear(&call) != 0 || call.way != FUSED) return {};
  const auto y = empty_rows(rows, call.N);
  call.y = address(y);
  launch(product.linear, call, rows);
  return y;
}

inline Call linear_call(
    const Tensor& rows, const Tensor& weight, const Tensor& bias, const Product& product) {
  auto call = rows_call(rows.numel() / rows.size(-1), weight.size(0), product.context);
  call.K = rows.size(-1);
  call.weight = address(weight);
  call.bias = address(bias);
  return call;
}

// dy W, of dense matrices.
inline Tensor input_gradient(const Tensor& dy, const Tensor& weight, const Product& product) {
  if (product.input_gradient && dy.is_contiguous()) {
    auto call = rows_call(dy.size(0), dy.size(1), product.context);
    call.K = weight.size(1);
    call.dy = address(dy);
    call.weight = address(weight);
    if (product.plan_input_gradient(&call) == 0 && call.way == FUSED) {
      const auto dx = at::empty({call.M, call.K}, dy.options());
      call.dx = address(dx);
      launch(product.input_gradient, call, dy);
      return dx;
    }
  }
  return at::mm(dy, weight);
}

// The product dW = dy^T z, which brings db along; nothing where its plan declines. z may be written
// after this.
inline std::optional<Call> planned_weight_gradient(
    const Tensor& dy, const Tensor& z, const Product& product) {
  if (!product.weight_gradient || !dy.is_contiguous()) return std::nullopt;
  auto call = rows_call(z.size(0), dy.size(1), product.context);
  call.K = z.size(1);
  call.dy = address(dy);
  call.z = address(z);
  if (product.plan_weight_gradient(&call) != 0 || call.way == DECLINED) return std::nullopt;
  return call;
}

// Runs that product: dW, shaped as the weight, and db where the record has its address.
inline Tensor weight_gradient(Call& call, const Tensor& weight, const Product& product) {
  const auto dweight = at::empty_like(weight);
  call.dweight = address(dweight);
  const auto workspace = workspace_of(call, weight);
  launch(product.weight_gradient, call, weight);
  return dweight;
}

}  // namespace fused_norm
