// The op family without Python: its forward, and its backward as a node of PyTorch's graph.
//
// Both passes ask the kernels' plan, allocate their results and call C functions of the kernels'
// libraries, with PyTorch's products between them. Whatever is not plain (a second derivative, a
// compiler or a mode that watches, a tensor of another layout) goes back to Python.

#include <pthread.h>

#include <torch/version.h>

#include "arguments.h"
#include "compiled_ops.h"
#include "computed.h"
#include "row_node.h"
#include "seam_node.h"

namespace {

using namespace fused_norm;
// PyTorch's headers have another of that name.
namespace py = fused_norm::python;

PyObject* wrapped(const Seam& kind, const Operands& t, const Results& results, bool returns_sum) {
  Tensors all = results.outputs;
  if (returns_sum) all.push_back(kind.returns_sum ? results.sum : t[X]);
  if (kind.returns_norm) all.push_back(results.norm);
  if (all.size() == 1) return THPVariable_Wrap(all[0]);
  py::tuple tuple(all.size());
  for (size_t i = 0; i < all.size(); ++i) tuple.set(i, wrap(all[i]));
  return tuple.release();
}

// Computes a call and gives its results their node; one tensor, or a tuple of them. None where that
// is left to Python.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == ARGUMENTS, "forward takes ", int{ARGUMENTS}, " arguments");
  const auto t = operands_of(arguments, arguments[WEIGHT], arguments[BIAS]);
  if (!t) Py_RETURN_NONE;
  auto kind = seam_of(arguments, *t);
  if (!kind) Py_RETURN_NONE;
  const bool keeps = at::GradMode::is_enabled() &&
      std::any_of(t->flat.begin(), t->flat.end(), [](const Tensor& v) {
                       return v.defined() && v.requires_grad();
                     });
  // What is saved has to be an input or a result: second derivatives reach x through it.
  if (keeps) kind->returns_sum = t->has_sum();
  const auto found = computed(
      *kind, *t, keeps,
      (*t)[OUT_WEIGHT].defined() ? "fused_norm::norm_mlp" : "fused_norm::norm_linear");
  if (!found) Py_RETURN_NONE;
  if (keeps) set_node(*kind, *t, found->results, found->kernels);
  return wrapped(*kind, *t, found->results, arguments[RETURN_SUM] == Py_True);
  END_HANDLE_TH_ERRORS
}

// trainable_eps(x, o): the norm of a trained eps. None where that is left to Python.
PyObject* trainable_eps(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "trainable_eps takes 2 arguments");
  if (!THPVariable_CheckExact(arguments[0]) || !THPVariable_CheckExact(arguments[1])) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(arguments[0]), &o = THPVariable_Unpack(arguments[1]);
  if (!are_rows_with_scalar(x, o) || fused_norm::is_watched()) Py_RETURN_NONE;
  const bool keeps = at::GradMode::is_enabled() && (x.requires_grad() || o.requires_grad());
  const auto& kernels = RowKernels::find(x);
  Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = empty(x.sizes(), x);
    auto call = row_call(x, o, kernels.context);
    call.inputs[0] = x.data_ptr();
    call.outputs[0] = y.data_ptr();
    kernels.run(kernels.forward, call);
  }
  if (keeps) set_node(x, o, y, kernels);
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// set_python(kernels, is_alone, is_captured, fold, backward, row_kernels, row_backward,
// prepare_products): what this module calls.
PyObject* set_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject** const places[] = {
      &python_kernels, &python_is_alone, &python_is_captured, &python_fold,
      &python_backward, &python_row_kernels, &python_row_backward, &python_prepare};
  TORCH_CHECK(count == std::ssize(places), "set_python takes ", std::size(places), " arguments");
  ++KernelsOf::told;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_IncRef(arguments[i]);
    Py_DecRef(std::exchange(*places[i], arguments[i]));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// set_frozen(level): whether parameters are frozen, and values of some offloaded.
PyObject* set_frozen(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 1, "set_frozen takes 1 argument");
  frozen_level = static_cast<int>(PyLong_AsLong(arguments[0]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"forward", fast(forward), METH_FASTCALL,
     "forward(*tensors by name, weight, bias, normalization, activation, eps, weight_offset, "
     "joined, return_sum, return_norm, recompute)"},
    {"op_forward", fast(op_forward), METH_FASTCALL, "op_forward(*those of forward, keeps)"},
    {"op_backward", fast(op_backward), METH_FASTCALL,
     "op_backward(*those of forward, products, grad_outputs, wanted)"},
    {"op_linear_add", fast(op_linear_add), METH_FASTCALL, "op_linear_add(x, weight, bias, residual)"},
    {"op_linear_add_backward", fast(op_linear_add_backward), METH_FASTCALL,
     "op_linear_add_backward(grad_output, x, weight, wanted)"},
    {"trainable_eps", fast(trainable_eps), METH_FASTCALL, "trainable_eps(x, o)"},
    {"set_python", fast(set_python), METH_FASTCALL,
     "set_python(kernels, is_alone, is_captured, fold, backward, row_kernels, "
     "row_backward, prepare_products)"},
    {"set_frozen", fast(set_frozen), METH_FASTCALL, "set_frozen(level)"},
    {nullptr, nullptr, 0, nullptr}};
#define AS_TEXT_(major, minor) #major "." #minor
#define AS_TEXT(major, minor) AS_TEXT_(major, minor)
constexpr const char* PYTORCH_MINOR_VERSION = AS_TEXT(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "node", "The op family and its backward as a node without Python.", -1,
    methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_node() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  PyObject* created = PyModule_Create2(&module, PYTHON_ABI_VERSION);
  if (created) PyModule_AddStringConstant(created, "TORCH", PYTORCH_MINOR_VERSION);
  return created;
}
