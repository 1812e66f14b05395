// Norm + Linear and its gradients as PyTorch's ops, which eager mode, compiled graphs and exported programs
// call.

#pragma once

#include <charconv>
#include <string_view>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "gradients.h"

namespace fused_norm {

using Given = torch::stable::Tensor;
using Optional = std::optional<Given>;
using Handles = std::vector<Given>;
using Optionals = std::vector<Optional>;

inline Tensor tensor_of(const Optional& given) {
  return given ? Tensor::borrowed(given->get()) : Tensor();
}

inline Given given_of(const Tensor& tensor) {
  return Given(tensor.released());
}

// The number of a norm or an activation.
inline int64_t number_of(std::string_view name) {
  if (name.empty()) return 0;
  std::string_view left = fused_norm::python.numbers;
  while (!left.empty()) {
    const auto item = left.substr(0, left.find(' '));
    const auto end = item.find('=');
    int64_t number = 0;
    if (item.substr(0, end) == name) {
      std::from_chars(item.data() + end + 1, item.data() + item.size(), number);
      return number;
    }
    left.remove_prefix(std::min(item.size() + 1, left.size()));
  }
  throw std::runtime_error("fused_norm: no norm or activation is called " + std::string(name));
}

// The message of the last exception of an op in Python: PyTorch before 2.13 keeps none.
inline thread_local std::string python_error;

// Runs an op in Python, for parameters that are frozen or for empty tensors.
template <class Result = Handles, class... Arguments>
Result call_python(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  python_error.clear();
  const auto status = torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION);
  if (status != AOTI_TORCH_SUCCESS && !python_error.empty()) throw std::runtime_error(python_error);
  check(status, op);
  return torch::stable::detail::to<Result>(stack[0]);
}

// The arguments that every op of the family begins with.
#define TENSORS                                                                                 \
  Given x, Optional residual, Optional gamma, Optional beta, Optional scale, Optional shift,    \
      Optional mean, Optional rstd, Optional out_weight, Optional out_bias,                     \
      Optional out_residual, Handles weights, Optionals biases
#define SPEC                                                                                    \
  std::string normalization, std::string activation, double eps, double weight_offset,          \
      bool joined, bool returns_sum, bool returns_norm, bool recompute, bool batch_invariant
#define ARGUMENTS_OF_CALL                                                                       \
  x, residual, gamma, beta, scale, shift, mean, rstd, out_weight, out_bias, out_residual,       \
      weights, biases, normalization, activation, eps, weight_offset, joined, returns_sum,      \
      returns_norm, recompute, batch_invariant

inline Tensor as_matrix(const Tensor& weight) {
  return !weight.defined() || weight.dim() != 2 || is_matrix(weight) ? weight : dense(weight);
}

// Makes a modulation dense, unless kernels take it as it is.
inline void make_readable(Operands& t) {
  Tensor &scale = t.flat[SCALE], &shift = t.flat[SHIFT];
  const auto pitch = [](const Tensor& v) { return v.defined() ? pitch_of(v) : 0; };
  const bool is_alike = !scale.defined() || !shift.defined() || pitch(scale) == pitch(shift);
  for (Tensor* const v : {&scale, &shift}) {
    if (v->defined() && (!is_alike || !pitch(*v))) *v = dense(*v);
  }
}

// The tensors, dense except for transposed weights, which products take, and parts of rows that modulate.
inline Operands operands_of(TENSORS) {
  if (weights.size() != biases.size()) {
    throw std::runtime_error("fused_norm: as many biases as weights are needed, None for none");
  }
  Operands t(weights.size());
  const Optional named[] = {x, residual, gamma, beta, scale, shift, mean, rstd, out_weight,
                            out_bias, out_residual};
  for (size_t place = 0; place < NAMED; ++place) {
    const auto tensor = tensor_of(named[place]);
    const bool is_modulation = place == SCALE || place == SHIFT;
    t.flat[place] = place == OUT_WEIGHT ? as_matrix(tensor) : is_modulation ? tensor : dense(tensor);
  }
  make_readable(t);
  for (size_t i = 0; i < weights.size(); ++i) {
    t.flat[NAMED + i] = as_matrix(tensor_of(weights[i]));
    t.flat[NAMED + weights.size() + i] = dense(tensor_of(biases[i]));
  }
  return t;
}

inline std::pair<Operands, Spec> parsed(TENSORS, SPEC) {
  return {
      operands_of(
          x, residual, gamma, beta, scale, shift, mean, rstd, out_weight, out_bias, out_residual,
          weights, biases),
      {number_of(normalization), number_of(activation), eps, weight_offset, joined, returns_sum,
       returns_norm, recompute, batch_invariant}};
}

inline bool is_empty(const Given& x, const Handles& weights, const Optional& out_weight) {
  const auto has_none = [](const Given& v) { return v.numel() == 0; };
  return has_none(x) || std::any_of(weights.begin(), weights.end(), has_none) ||
      (out_weight && has_none(*out_weight));
}

inline Extent checked(const Spec& spec, const Operands& t) {
  const auto extent = extent_of(spec, t);
  if (!extent) throw std::runtime_error("fused_norm: no kernel takes such tensors as these");
  return *extent;
}

// Returns the defined results in one list.
inline Handles flat(const Results& results) {
  Handles all;
  const auto append = [&](const Tensor& tensor) {
    if (tensor.defined()) all.push_back(given_of(tensor));
  };
  for (const auto& y : results.outputs) append(y);
  for (const auto& one : {results.sum, results.norm, results.mean, results.rstd}) append(one);
  for (const auto& h : results.products) append(h);
  return all;
}

inline Handles run_forward(TENSORS, SPEC, bool keeps, const Fold* given) {
  const auto [t, spec] = parsed(ARGUMENTS_OF_CALL);
  const auto extent = checked(spec, t);
  const OnDevice on_device(t[X]);
  const NoGrad no_grad;
  const auto kernels = kernels_of(spec, t, {});
  const auto fold = given ? *given : fold_for(spec, t, extent, keeps, kernels);
  if (!fold) throw Declined();
  auto results = forward(spec, t, extent, keeps, *fold, kernels);
  if (given) folds.keep(spec, t, *given, kernels.is_captured);
  if (results.sum.defined()) {
    results.sum = laid_as_sum(results.sum, {tensor_of(x), tensor_of(residual)});
  }
  return flat(results);
}

inline Handles norm_linear_forward(TENSORS, SPEC, bool keeps) {
  if (!is_empty(x, weights, out_weight)) {
    try {
      return run_forward(ARGUMENTS_OF_CALL, keeps, nullptr);
    } catch (const Declined&) {
    }
  }
  return call_python("fused_norm::norm_linear_forward_by_python", ARGUMENTS_OF_CALL, keeps);
}

// The same with the fold of frozen parameters for an activation in the epilogue; -1 for none.
inline Handles norm_linear_forward_folded(
    TENSORS, SPEC, bool keeps, Optional fold_weight, Optional fold_sums, int64_t fold_activation,
    bool is_offloaded) {
  Fold fold{tensor_of(fold_weight), tensor_of(fold_sums), fold_activation, is_offloaded};
  return run_forward(ARGUMENTS_OF_CALL, keeps, &fold);
}

// The activation that a fold of a call's parameters would be for, or -1.
inline int64_t norm_linear_wanted_fold(TENSORS, SPEC) {
  const auto [t, spec] = parsed(ARGUMENTS_OF_CALL);
  return wanted_fold(spec, t, checked(spec, t), kernels_of(spec, t, {}));
}

// The fold of parameters for an activation in the epilogue, in two tensors.
inline Handles norm_linear_fold(
    Optional gamma, Optional beta, Handles weights, Optionals biases, std::string normalization,
    double weight_offset, int64_t activation) {
  // A weight replaces x, whose values are not read.
  const auto t = operands_of(
      weights[0], {}, gamma, beta, {}, {}, {}, {}, {}, {}, {}, weights, biases);
  Spec spec{number_of(normalization), activation};
  spec.weight_offset = weight_offset;
  spec.is_joined = spec.is_gated();
  const auto extent = checked(spec, t);
  const OnDevice on_device(t[X]);
  const auto kernels = kernels_of(spec, t, {});
  auto call = norm_call(spec, t, extent, kernels.product.context);
  give_weights(call, spec, t, extent, true);
  Group parts;
  if (has_own_outputs(spec, t)) parts.give(call, t);
  const Fold fold{empty(Shape{extent.N, extent.K}, t[X]), empty(Shape{2, extent.N}, t[X], FLOAT32)};
  fold.give(call);
  if (!kernels.product.fold) throw std::runtime_error("fused_norm: no kernel folds here");
  launch(kernels.product.fold, call, t[X]);
  return {given_of(fold.weight), given_of(fold.sums)};
}

inline std::pair<Gradients, Wanted> gradients_of(
    TENSORS, SPEC, const Handles& products, const Optionals& grad_outputs,
    const std::vector<int64_t>& wanted, const Optionals& main_grads) {
  const auto [t, spec] = parsed(ARGUMENTS_OF_CALL);
  const auto extent = checked(spec, t);
  const OnDevice on_device(t[X]);
  const NoGrad no_grad;
  Tensors kept, grads, totals;
  for (const auto& h : products) kept.push_back(Tensor::borrowed(h.get()));
  for (const auto& g : grad_outputs) grads.push_back(tensor_of(g));
  for (const auto& g : main_grads) totals.push_back(tensor_of(g));
  Wanted flags(t.flat.size());
  for (const int64_t place : wanted) flags.at(static_cast<size_t>(place)) = true;
  auto found = backward(
      spec, t, extent, kept, grads, flags, totals, kernels_of(spec, t, {}));
  return {std::move(found), std::move(flags)};
}

inline Handles norm_linear_backward(
    TENSORS, SPEC, Handles products, Optionals grad_outputs, std::vector<int64_t> wanted) {
  if (is_empty(x, weights, out_weight)) {
    return call_python(
        "fused_norm::norm_linear_backward_by_python", ARGUMENTS_OF_CALL, products, grad_outputs, wanted);
  }
  const auto found = gradients_of(ARGUMENTS_OF_CALL, products, grad_outputs, wanted, {}).first;
  Handles all;
  for (const int64_t place : wanted) {
    all.push_back(given_of(found.found[static_cast<size_t>(place)]));
  }
  return all;
}

// The same for weights with a `main_grad`. An empty tensor means that a gradient has been added; the
// normalized rows follow if a weight's gradient is still to be computed from them.
inline Handles norm_linear_backward_into(
    TENSORS, SPEC, Handles products, Optionals grad_outputs, std::vector<int64_t> wanted,
    Optionals main_grads) {
  const auto found = gradients_of(ARGUMENTS_OF_CALL, products, grad_outputs, wanted, main_grads).first;
  Handles all;
  for (const int64_t place : wanted) {
    const auto& gradient = found.found[static_cast<size_t>(place)];
    all.push_back(given_of(gradient.defined() ? gradient : empty(Shape{0}, tensor_of(x))));
  }
  if (found.z.defined()) all.push_back(given_of(found.z));
  return all;
}

#undef TENSORS
#undef SPEC
#undef ARGUMENTS_OF_CALL

}  // namespace fused_norm
