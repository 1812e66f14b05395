// A Linear layer by itself, on rows that a pass has normalized or on any, by Hopper's products:
// backends/linear.py in C++.

#pragma once

#include <array>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

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

// dW, shaped as the weight, by our product or PyTorch's; ours finds db as well, if that is wanted.
inline Tensor weight_gradient(
    const Tensor& dy, const Tensor& rows, const Tensor& weight, bool wants_bias, Tensor& dbias,
    const Product& product) {
  auto call = planned_weight_gradient(dy, rows, product);
  if (!call) return at::mm(dy.t(), rows);
  if (wants_bias) dbias = at::empty({dy.size(1)}, dy.options());
  call->dbias = address(dbias);
  return weight_gradient(*call, weight, product);
}

// Whether kernels take a Linear layer's tensors as they stand.
inline bool is_plain_linear(
    const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& sum) {
  if (!x.defined() || !x.dim() || !x.numel() || !weight.defined() || weight.dim() != 2) {
    return false;
  }
  const Plain is_plain(x);
  const auto dtype = x.scalar_type();
  const auto N = weight.size(0);
  c10::DimVector shape(x.sizes().begin(), x.sizes().end());
  shape.back() = N;
  return N && is_plain.is(x) && is_plain(weight, {N, x.size(-1)}, dtype) &&
      is_plain.may_be(bias, N, dtype) && is_plain.may_be(sum, shape, dtype);
}

// The gradients of a Linear layer's rows, weight and bias, undefined where not wanted.
inline std::array<Tensor, 3> linear_gradients(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const std::array<bool, 3>& wanted,
    const Product& product) {
  const auto dy = as_rows(grad), rows = as_rows(x);
  std::array<Tensor, 3> found;
  auto& [dx, dweight, dbias] = found;
  if (wanted[0]) dx = input_gradient(dy, weight, product).view(x.sizes());
  if (wanted[1]) dweight = weight_gradient(dy, rows, weight, wanted[2], dbias, product);
  if (wanted[2] && !dbias.defined()) dbias = dy.sum(0);
  return found;
}

}  // namespace fused_norm
