// The ops that compiled graphs run. Each returns None where it is left to Python.

#pragma once

#include <algorithm>
#include <array>

#include "arguments.h"
#include "computed.h"
#include "linear.h"
#include "seam_backward.h"

namespace fused_norm {

// The kind of an op's call, which says itself whether the sum is a result: of its backward the sum
// is x. Nothing where kernels cannot take it.
inline std::optional<Seam> op_of(PyObject* const* arguments, const std::optional<Operands>& t) {
  if (!t) return std::nullopt;
  auto kind = seam_of(arguments, *t);
  if (kind) kind->returns_sum = arguments[RETURN_SUM] == Py_True;
  return kind;
}

// op_forward(*those of forward, keeps): the list that the op seam_forward returns. None where that is
// left to Python.
inline PyObject* op_forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == ARGUMENTS + 1, "op_forward takes ", ARGUMENTS + 1, " arguments");
  const auto t = operands_of(arguments, arguments[WEIGHT], arguments[BIAS]);
  const auto kind = op_of(arguments, t);
  if (!kind) Py_RETURN_NONE;
  const bool keeps = arguments[ARGUMENTS] == Py_True;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto found = computed(*kind, *t, keeps);
  if (!found) Py_RETURN_NONE;
  const auto& [outputs, sum, norm, mean, rstd, products] = found->results;
  Tensors all = outputs;
  if (keeps || kind->returns_sum) all.push_back(sum);
  for (const auto& one : {norm, mean, rstd}) all.push_back(one);
  all.append(products.begin(), products.end());
  all.erase(
      std::remove_if(all.begin(), all.end(), [](const Tensor& v) { return !v.defined(); }),
      all.end());
  return wrap_all(all).release();
  END_HANDLE_TH_ERRORS
}

// op_backward(*those of forward, products, grad_outputs, wanted): the list that the op seam_backward
// returns. None where that is left to Python.
inline PyObject* op_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == ARGUMENTS + 3, "op_backward takes ", ARGUMENTS + 3, " arguments");
  const auto t = operands_of(arguments, arguments[WEIGHT], arguments[BIAS]);
  const auto kind = op_of(arguments, t);
  const auto products = tensors_of(arguments[ARGUMENTS]);
  const auto grads = tensors_of(arguments[ARGUMENTS + 1]);
  if (!kind || !products || !grads) Py_RETURN_NONE;
  const Tensor& x = (*t)[X];
  if (!x.defined() || !has_kernel(x, t->norm_dtype()) || is_watched()) Py_RETURN_NONE;
  prepare_products(current_stream(x.device()));
  Wanted wanted;
  for (PyObject* flag : items_of(arguments[ARGUMENTS + 2])) wanted.push_back(flag == Py_True);
  const Conditions conditions(x);
  if (conditions.is_captured || wanted.size() != t->flat.size()) Py_RETURN_NONE;
  const Kernels& kernels = KernelsOf::find(x, kind->normalization, conditions.is_alone);
  std::optional<Tensors> found;
  {
    py::gil_scoped_release without_lock;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    found = gradients_of(*kind, *t, *products, *grads, wanted, kernels);
  }
  if (!found) Py_RETURN_NONE;
  py::list all;
  for (size_t place = 0; place < wanted.size(); ++place) {
    if (!wanted[place]) continue;
    if (!(*found)[place].defined()) Py_RETURN_NONE;
    all.append(wrap((*found)[place]));
  }
  return all.release();
  END_HANDLE_TH_ERRORS
}

// The kernels for a Linear layer in a compiled graph; null where that is left to Python.
inline const Kernels* kernels_of_linear(const Tensor& x) {
  if (is_watched()) return nullptr;
  prepare_products(current_stream(x.device()));
  const Conditions conditions(x);
  return conditions.is_captured ? nullptr : &KernelsOf::find(x, 0, conditions.is_alone);
}

// op_linear_add(x, weight, bias, residual): what the op linear_add returns. None where that is left to
// Python.
inline PyObject* op_linear_add(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4, "op_linear_add takes 4 arguments");
  if (!std::all_of(arguments, arguments + count, is_tensor_or_none)) Py_RETURN_NONE;
  const auto x = tensor_of(arguments[0]);
  Operands t;
  t.flat[OUT_WEIGHT] = tensor_of(arguments[1]);
  t.flat[OUT_BIAS] = tensor_of(arguments[2]);
  t.flat[OUT_RESIDUAL] = tensor_of(arguments[3]);
  if (!is_plain_linear(x, t[OUT_WEIGHT], t[OUT_BIAS], t[OUT_RESIDUAL])) Py_RETURN_NONE;
  const auto* kernels = kernels_of_linear(x);
  if (!kernels) Py_RETURN_NONE;
  Tensor y;
  {
    py::gil_scoped_release without_lock;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = second_linear(t, x, *kernels);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// op_linear_add_backward(grad_output, x, weight, wanted): the list that the op linear_add_backward
// returns. None where that is left to Python.
inline PyObject* op_linear_add_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4, "op_linear_add_backward takes 4 arguments");
  if (!std::all_of(arguments, arguments + 3, is_tensor_or_none)) Py_RETURN_NONE;
  const auto flags = items_of(arguments[3]);
  const auto x = tensor_of(arguments[1]), weight = tensor_of(arguments[2]);
  Tensor grad = tensor_of(arguments[0]);
  if (flags.size() != 3 || !grad.defined()) Py_RETURN_NONE;
  if (!is_plain_linear(x, weight, Tensor(), Tensor())) Py_RETURN_NONE;
  const auto* kernels = kernels_of_linear(x);
  if (!kernels) Py_RETURN_NONE;
  std::array<Tensor, 3> found;
  {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    grad = grad.contiguous();
    if (!is_plain_linear(x, weight, Tensor(), grad)) Py_RETURN_NONE;
    std::array<bool, 3> wanted;
    for (size_t i = 0; i < 3; ++i) wanted[i] = flags[i] == Py_True;
    py::gil_scoped_release without_lock;
    found = linear_gradients(grad, x, weight, wanted, kernels->product);
    // A schema cannot promise None.
    for (auto& gradient : found) {
      if (!gradient.defined()) gradient = at::empty({0}, x.options());
    }
  }
  return wrap_all(found).release();
  END_HANDLE_TH_ERRORS
}

}  // namespace fused_norm
