// A Linear layer alone, on normalized or other rows: with our products if they are faster or if rows
// may not depend on each other, otherwise with PyTorch's.

#pragma once

#include "operands.h"

namespace fused_norm {

// Adds a dense tensor to another, rounded once.
inline void add(const Tensor& to, const Tensor& other, const Passes& passes) {
  Call call{};
  call.K = to.size(-1);
  call.M = to.numel() / call.K;
  call.context = passes.context;
  call.threads = threads();
  call.x = call.sum = address(to);
  call.residual = address(other);
  run(passes.plan_normalize, passes.normalize, call, to);
}

// The record of x weight^T + bias, of dense rows; without x.
inline Call linear_call(
    const Tensor& rows, const Tensor& weight, const Tensor& bias, const Product& product) {
  auto call = rows_call(rows.numel() / rows.size(-1), weight.size(0), product.context);
  call.K = rows.size(-1);
  call.weight = address(weight);
  call.bias = address(bias);
  return call;
}

// Runs a record on dense rows; none if PyTorch's product, or what follows it, is faster.
inline Tensor linear_by_kernel(
    Call& call, const Tensor& rows, const Tensor& weight, const Product& product) {
  if (!product.linear || !weight.is_contiguous() || product.plan_linear(&call) != 0 ||
      call.strategy != FUSED) {
    return {};
  }
  const auto y = empty_rows(rows, call.N);
  call.y = address(y);
  launch(product.linear, call, rows);
  return y;
}

// Dense tensors; on a GPU, copied if loads of 16 bytes cannot read them.
inline Tensor aligned(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_contiguous()) {
    const bool is_aligned =
        tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.data()) % ALIGNMENT == 0;
    return is_aligned ? tensor : cloned(tensor);
  }
  return dense(tensor);
}

[[noreturn]] inline void fail_invariant() {
  throw std::runtime_error("fused_norm: batch_invariant() has no product for such sizes");
}

// x weight^T + bias + residual, where no row depends on another.
inline Tensor invariant_linear(
    const Tensor& given, const Tensor& given_weight, const Tensor& given_bias,
    const Tensor& given_residual, const Kernels& kernels) {
  const Tensor x = aligned(given), weight = aligned(given_weight), bias = aligned(given_bias),
               residual = aligned(given_residual);
  const auto& product = kernels.product;
  auto call = linear_call(x, weight, bias, product);
  call.invariant = true;
  call.x = address(x);
  if (!x.is_cpu()) {
    call.residual = address(residual);
    const auto y = linear_by_kernel(call, x, weight, product);
    if (!y.defined()) fail_invariant();
    return y;
  }
  call.normalization = NO_NORM;
  if (!product.forward || product.plan_forward(&call) != 0 || call.strategy != FUSED) fail_invariant();
  const auto y = empty_rows(x, call.N);
  call.y = address(y);
  const auto workspace = workspace_of(call, x);
  launch(product.forward, call, x);
  if (residual.defined()) add(y, residual, kernels.passes);
  return y;
}

// dy weight, where no row depends on another.
inline Tensor invariant_input_gradient(
    const Tensor& given, const Tensor& given_weight, const Kernels& kernels) {
  const Tensor dy = aligned(given), weight = aligned(given_weight);
  const auto& product = kernels.product;
  auto call = rows_call(dy.size(0), dy.size(1), product.context);
  call.K = weight.size(1);
  call.invariant = true;
  call.dy = address(dy);
  call.weight = address(weight);
  const auto dx = empty(Shape{call.M, call.K}, dy);
  if (dy.is_cpu()) {
    // Without a norm, x is read but does not affect the result.
    call.normalization = NO_NORM;
    call.x = call.dx = address(dx);
    if (!product.backward || product.plan_backward(&call) != 0 || call.strategy != FUSED) {
      fail_invariant();
    }
    const auto workspace = workspace_of(call, dy);
    launch(product.backward, call, dy);
    return dx;
  }
  if (!product.input_gradient || product.plan_input_gradient(&call) != 0 || call.strategy != FUSED) {
    fail_invariant();
  }
  call.dx = address(dx);
  launch(product.input_gradient, call, dy);
  return dx;
}

// Writes rows weight^T + bias with PyTorch's product.
inline void linear_by_pytorch(
    const Tensor& y, const Tensor& rows, const Tensor& weight, const Tensor& bias) {
  const auto by = weight.transposed();
  if (bias.defined()) {
    addmm(y, bias, rows, by);
  } else {
    mm(y, rows, by);
  }
}

// x weight^T + bias + residual, of dense rows.
inline Tensor linear_add(
    const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
    bool invariant, const Kernels& kernels) {
  if (invariant) return invariant_linear(x, weight, bias, residual, kernels);
  auto call = linear_call(x, weight, bias, kernels.product);
  call.x = address(x);
  call.residual = address(residual);
  auto y = linear_by_kernel(call, x, weight, kernels.product);
  if (y.defined()) return y;
  y = empty_rows(x, weight.size(0));
  if (residual.defined() && !bias.defined()) {
    addmm(y.rows(), residual.rows(), x.rows(), weight.transposed());
    return y;
  }
  linear_by_pytorch(y.rows(), x.rows(), weight, bias);
  if (residual.defined()) add(y, residual, kernels.passes);
  return y;
}

// Lets a product multiply its result by a gate for each group of rows.
inline void set_gate(Call& call, void* gate, int64_t groups, int64_t pitch) {
  call.gate = gate;
  call.groups = groups;
  call.group_pitch = pitch;
}

// residual + gate (x weight^T + bias), of dense rows; none if no kernel takes these, or others are faster.
inline Tensor linear_gated_add(
    const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
    const Tensor& gate, const Kernels& kernels) {
  if (gate.dtype() != x.dtype() || gate.device_type() != x.device_type()) return {};
  const auto groups = groups_of(gate, residual), pitch = pitch_of(gate);
  if (!groups || !pitch) return {};
  auto call = linear_call(x, weight, bias, kernels.product);
  call.x = address(x);
  call.residual = address(residual);
  set_gate(call, address(gate), groups, pitch);
  return linear_by_kernel(call, x, weight, kernels.product);
}

// A gradient for PyTorch's products of a weight [N, K]: with columns of zeros up to a multiple of 16
// bytes, without which a GPU's products load rows element by element, at a sixth of the speed (GPT-2's
// 50,257 tokens). Small products do without the copy.
inline Tensor with_whole_columns(const Tensor& dy, const Tensor& weight) {
  constexpr int64_t ELEMENTS = 8, FEWEST_PRODUCTS = int64_t{1} << 30;
  const auto M = dy.size(0), N = dy.size(1);
  if (dy.is_cpu() || dy.element_size() != 2 || !weight.is_contiguous() || N % ELEMENTS == 0 ||
      M * N * weight.size(1) < FEWEST_PRODUCTS) {
    return dy;
  }
  const auto whole = empty(Shape{M, (N + ELEMENTS - 1) / ELEMENTS * ELEMENTS}, dy);
  copy(whole.narrowed(0, N), dy);
  check(aoti_torch_zero_(whole.narrowed(N, whole.size(1) - N).get()), "zero_");
  return whole;
}

// A weight with as many rows as its gradient has columns, the last of them zeros.
inline Tensor with_whole_rows(const Tensor& weight, int64_t rows) {
  const auto N = weight.size(0), K = weight.size(1);
  if (rows == N) return weight;
  const auto whole = empty(Shape{rows, K}, weight);
  const Shape strides{K, 1};
  copy(whole.viewed(weight.sizes(), strides), weight);
  const auto rest = whole.viewed(Shape{rows - N, K}, strides, N * K);
  check(aoti_torch_zero_(rest.get()), "zero_");
  return whole;
}

// dy weight, of matrices.
inline Tensor input_gradient(
    const Tensor& dy, const Tensor& weight, bool invariant, const Kernels& kernels) {
  if (invariant) return invariant_input_gradient(dy, weight, kernels);
  const auto& product = kernels.product;
  const auto dx = empty(Shape{dy.size(0), weight.size(1)}, dy);
  if (product.input_gradient && dy.is_contiguous() && weight.is_contiguous()) {
    auto call = rows_call(dy.size(0), dy.size(1), product.context);
    call.K = weight.size(1);
    call.dy = address(dy);
    call.weight = address(weight);
    if (product.plan_input_gradient(&call) == 0 && call.strategy == FUSED) {
      call.dx = address(dx);
      launch(product.input_gradient, call, dy);
      return dx;
    }
  }
  mm(dx, dy, weight);
  return dx;
}

// The product dW = dy^T z, which also computes db if wanted; nothing if its plan declines. z may be
// overwritten after this.
inline std::optional<Call> planned_weight_gradient(
    const Tensor& dy, const Tensor& z, const Tensor& weight, bool wants_bias,
    const Product& product) {
  if (!product.weight_gradient || !dy.is_contiguous() || !weight.is_contiguous()) {
    return std::nullopt;
  }
  auto call = rows_call(z.size(0), dy.size(1), product.context);
  call.K = z.size(1);
  call.dy = address(dy);
  call.z = address(z);
  if (wants_bias) call.dbias = WANTED;
  if (product.plan_weight_gradient(&call) != 0 || call.strategy == DECLINED) return std::nullopt;
  call.dbias = nullptr;
  return call;
}

// Runs that product: dW, shaped like the weight, and db if the record has its address. dW has memory in
// `home`, unless that is undefined.
inline Tensor weight_gradient(
    Call& call, const Tensor& weight, const Product& product, const Tensor& home = {}) {
  const auto dweight = home.defined() ? home : empty_like(weight);
  call.dweight = address(dweight);
  const auto workspace = workspace_of(call, weight);
  launch(product.weight_gradient, call, weight);
  return dweight;
}

// dy^T z with PyTorch's product, laid out like the weight: autograd would copy another layout. dy may
// have more columns than the weight has rows, if dW has no home.
inline Tensor weight_gradient_by_pytorch(
    const Tensor& dy, const Tensor& z, const Tensor& weight, const Tensor& home = {}) {
  if (home.defined()) {
    mm(home, dy.transposed(), z);
    return home;
  }
  if (is_transposed(weight)) {
    const auto dweight = empty(Shape{weight.size(1), weight.size(0)}, weight);
    mm(dweight, z.transposed(), dy);
    return dweight.transposed();
  }
  const auto dweight = empty(Shape{dy.size(1), weight.size(1)}, weight);
  mm(dweight, dy.transposed(), z);
  return dy.size(1) == weight.size(0) ? dweight : dweight.viewed(weight.sizes(), weight.strides());
}

// The sum of the rows of a dense matrix, in `home` unless that is undefined.
inline Tensor sum_of_rows(const Tensor& rows, const Passes& passes, const Tensor& home = {}) {
  const auto sum = home.defined() ? home : empty(Shape{rows.size(1)}, rows);
  auto call = rows_call(rows.size(0), rows.size(1), passes.context);
  call.da = address(rows);
  call.dbias = address(sum);
  run(passes.plan_activate_backward, passes.activate_backward, call, rows);
  return sum;
}

// dW, shaped like the weight, and db if wanted.
inline Tensor parameter_gradients(
    const Tensor& dy, const Tensor& rows, const Tensor& weight, bool wants_weight, bool wants_bias,
    bool invariant, Tensor& dbias, const Kernels& kernels) {
  Tensor dweight;
  if (wants_weight) {
    auto call = invariant ? std::nullopt
                          : planned_weight_gradient(
                              dy, rows, weight, wants_bias, kernels.product);
    if (call) {
      if (wants_bias) dbias = empty(Shape{dy.size(1)}, dy);
      call->dbias = address(dbias);
      dweight = weight_gradient(*call, weight, kernels.product);
    } else {
      dweight = weight_gradient_by_pytorch(dy, rows, weight);
    }
  }
  if (wants_bias && !dbias.defined()) dbias = sum_of_rows(dense(dy), kernels.passes);
  return dweight;
}

}  // namespace fused_norm
