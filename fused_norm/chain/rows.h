// Ops that read rows and write rows: the programs of op/rows/op.mojo, on a CPU or a GPU's current
// stream.

#pragma once

#include "operands.h"

namespace fused_norm {

// The indices of OPS in op/rows/op.mojo.
enum class RowOp : int64_t {
  TRAINABLE_EPS, TRAINABLE_EPS_BACKWARD, MEAN, NORM, NORM_BACKWARD, DIV, DIV_BACKWARD
};

inline void require(bool holds) {
  if (!holds) throw std::runtime_error("fused_norm: no kernel takes such tensors as these");
}

// Runs an op on rows of one shape and dtype. An output without memory is not wanted.
inline void run_rows(
    RowOp op, std::initializer_list<Tensor> inputs, std::initializer_list<Tensor> outputs,
    const Tensor& parameter = {}, const Tensor& parameter_gradient = {}) {
  const Tensor& x = *inputs.begin();
  for (const auto& v : inputs) {
    require(are_equal(v.sizes(), x.sizes()) && v.dtype() == x.dtype() && v.is_contiguous());
  }
  Question question{};
  question.dtype = x.dtype();
  question.is_cpu = x.is_cpu();
  question.is_rows = true;
  if (!x.is_cpu()) {
    question.device = x.device();
    question.stream = reinterpret_cast<int64_t>(current_stream(question.device));
  }
  const auto& kernels = loaded(question);
  RowCall call{};
  call.K = x.size(-1);
  call.M = x.numel() / call.K;
  call.context = kernels.passes.context;
  call.threads = threads();
  call.parameter = address(parameter);
  call.parameter_is_float32 = parameter.defined() && parameter.dtype() == FLOAT32;
  call.parameter_gradient = address(parameter_gradient);
  Tensor shares;
  if (parameter_gradient.defined()) {
    shares = empty(Shape{call.M}, x, statistics_dtype(x.dtype()));
  }
  call.workspace = address(shares);
  size_t place = 0;
  for (const auto& v : outputs) call.outputs[place++] = address(v);
  place = 0;
  for (const auto& v : inputs) call.inputs[place++] = address(v);
  launch([&] { return kernels.rows(static_cast<int64_t>(op), &call); }, x);
}

// The result of an op that has one result.
inline Tensor row_result(RowOp op, std::initializer_list<Tensor> inputs, const Tensor& o = {}) {
  const auto y = empty_like(*inputs.begin());
  if (y.numel()) run_rows(op, inputs, {y}, o);
  return y;
}

// Whether kernels can take x, in its own layout, as rows and o as a scalar.
inline bool are_rows_with_scalar(const Tensor& x, const Tensor& o) {
  return x.defined() && o.defined() && x.dim() && x.numel() && x.size(-1) <= LONGEST_ROW &&
      x.is_contiguous() && x.data() && o.numel() == 1 && o.data() &&
      has_kernel(x, o.dtype(), x.dtype());
}

// The gradients of x and o of the norm of a trained eps, undefined where not wanted.
inline std::array<Tensor, 2> trainable_eps_gradients(
    const Tensor& dy, const Tensor& x, const Tensor& o, bool wants_x, bool wants_o) {
  std::array<Tensor, 2> found;
  if (wants_x) found[0] = empty_like(x);
  // Rows without elements contribute nothing.
  if (wants_o) found[1] = x.numel() ? empty_like(o) : zeros(o.sizes(), o, o.dtype());
  if (x.numel()) {
    run_rows(RowOp::TRAINABLE_EPS_BACKWARD, {dy, x}, {found[0]}, o, found[1]);
  }
  return found;
}

}  // namespace fused_norm
