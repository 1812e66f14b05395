// A product with a residual, the statistics of rows, and row ops, as PyTorch's ops.

#pragma once

#include <tuple>

#include "family_ops.h"
#include "rows.h"

namespace fused_norm {

inline Kernels kernels_for(const Tensor& x, bool invariant) {
  return Kernels::find(x, x.dtype(), 0, invariant, {});
}

inline Given linear_add_op(
    Given x, Given weight, Optional bias, Optional residual, bool batch_invariant) {
  const auto rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  const NoGrad no_grad;
  return given_of(linear_add(
      rows, as_matrix(tensor_of(weight)), dense(tensor_of(bias)), dense(tensor_of(residual)),
      batch_invariant, kernels_for(rows, batch_invariant)));
}

inline Given linear_gated_add_op(
    Given x, Given weight, Optional bias, Given residual, Given gate) {
  {
    const auto rows = dense(tensor_of(x));
    const OnDevice on_device(rows);
    const NoGrad no_grad;
    const auto y = linear_gated_add(
        rows, as_matrix(tensor_of(weight)), dense(tensor_of(bias)), dense(tensor_of(residual)),
        tensor_of(gate), kernels_for(rows, false));
    if (y.defined()) return given_of(y);
  }
  return call_python<Given>("fused_norm::linear_gated_add_by_python", x, weight, bias, residual, gate);
}

// Dense rows in the shape of another tensor.
inline Tensor shaped_as(const Tensor& rows, const Tensor& like) {
  return rows.viewed(like.sizes(), dense_strides(like.sizes()));
}

inline Handles linear_add_backward(
    Given grad_output, Given x, Given weight, std::vector<int64_t> wanted) {
  const auto rows = dense(tensor_of(x)).rows(), dy = dense(tensor_of(grad_output)).rows();
  const auto by = as_matrix(tensor_of(weight));
  const OnDevice on_device(rows);
  const NoGrad no_grad;
  std::array<bool, 3> is_wanted{};
  for (const int64_t place : wanted) is_wanted.at(static_cast<size_t>(place)) = true;
  const auto kernels = kernels_for(rows, false);
  std::array<Tensor, 3> found;
  if (is_wanted[0]) found[0] = shaped_as(input_gradient(dy, by, false, kernels), tensor_of(x));
  found[1] =
      parameter_gradients(dy, rows, by, is_wanted[1], is_wanted[2], false, found[2], kernels);
  Handles all;
  for (const int64_t place : wanted) all.push_back(given_of(found[static_cast<size_t>(place)]));
  return all;
}

// The sum of x and a residual, the mean of its rows (for a LayerNorm) and their rstd.
inline Handles statistics_of(
    const Given& given, const Optional& residual, const std::string& normalization, double eps) {
  Operands t(0);
  t.flat[X] = dense(tensor_of(given));
  t.flat[RESIDUAL] = dense(tensor_of(residual));
  const Tensor& x = t[X];
  Spec spec{number_of(normalization), 0, eps};
  const OnDevice on_device(x);
  const auto wide = statistics_dtype(x.dtype());
  const auto rows = x.sizes().first(static_cast<size_t>(x.dim()) - 1);
  Tensor total, mean;
  if (residual) total = empty_like(x);
  if (has_mean(spec)) mean = empty(rows, x, wide);
  const auto rstd = empty(rows, x, wide);
  if (x.numel()) {
    const auto kernels = kernels_for(x, false);
    const auto& passes = kernels.norm_passes;
    Call call{};
    call.K = x.size(-1);
    call.M = x.numel() / call.K;
    call.eps = eps;
    call.context = passes.context;
    call.threads = threads();
    call.normalization = spec.normalization;
    call.x = address(x);
    call.residual = address(t[RESIDUAL]);
    call.sum = address(total);
    call.mean = address(mean);
    call.rstd = address(rstd);
    run(passes.plan_normalize, passes.normalize, call, x);
  } else {
    for (const auto& v : {mean, rstd}) {
      if (v.defined()) check(aoti_torch_zero_(v.get()), "zero_");
    }
  }
  Handles all;
  for (const auto& v : {total, mean, rstd}) {
    if (v.defined()) all.push_back(given_of(v));
  }
  return all;
}

inline Handles add_statistics(Given x, Given residual, std::string normalization, double eps) {
  return statistics_of(x, residual, normalization, eps);
}

inline Handles row_statistics(Given x, std::string normalization, double eps) {
  return statistics_of(x, std::nullopt, normalization, eps);
}

template <RowOp op>
Given row_op(Given x) {
  const auto rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  return given_of(row_result(op, {rows}));
}

template <RowOp op>
Given row_op_of_two(Given a, Given b) {
  const auto one = dense(tensor_of(a)), two = dense(tensor_of(b));
  const OnDevice on_device(one);
  return given_of(row_result(op, {one, two}));
}

// A gradient that the schema cannot declare as optional: an empty tensor for None.
inline Given given_or_empty(const Tensor& gradient, const Tensor& like) {
  return given_of(gradient.defined() ? gradient : empty(Shape{0}, like));
}

inline Given trainable_eps_op(Given x, Given o) {
  const auto rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  return given_of(row_result(RowOp::TRAINABLE_EPS, {rows}, tensor_of(o)));
}

inline std::tuple<Given, Given> trainable_eps_backward_op(
    Given grad_output, Given x, Given o, std::vector<bool> mask) {
  const auto dy = dense(tensor_of(grad_output)), rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  const auto found = trainable_eps_gradients(dy, rows, tensor_of(o), mask.at(0), mask.at(1));
  return {given_or_empty(found[0], rows), given_or_empty(found[1], rows)};
}

inline std::tuple<Given, Given> div_backward_op(
    Given grad_output, Given a, Given b, std::vector<bool> mask) {
  const auto dy = dense(tensor_of(grad_output)), one = dense(tensor_of(a)), two = dense(tensor_of(b));
  const OnDevice on_device(one);
  Tensor da, db;
  if (mask.at(0)) da = empty_like(one);
  if (mask.at(1)) db = empty_like(two);
  if (one.numel()) run_rows(RowOp::DIV_BACKWARD, {dy, one, two}, {da, db});
  return {given_or_empty(da, one), given_or_empty(db, one)};
}

}  // namespace fused_norm
