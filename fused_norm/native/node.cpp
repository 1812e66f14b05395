// LayerNorm + Linear without Python: the forward, and the backward as a node of PyTorch's graph.
//
// Both passes ask the kernels' plan, allocate their results and call a C function of the kernels'
// library. What that declines is computed by Python's backends. Whatever is not plain (a second
// derivative, a compiler or a mode that watches, a tensor of another layout) goes back to Python.

#include <pthread.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include "call.h"
#include "python.h"

namespace {

using namespace fused_norm;
namespace py = fused_norm::python;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

enum Saved { X, GAMMA, BETA, WEIGHT, MEAN, RSTD, COUNT };

PyObject *python_forward = nullptr, *python_backward = nullptr;

// The first backward of a thread on a GPU is Python's, which makes PyTorch's products ready there:
// a captured graph may choose them later, and they cannot begin within a capture.
bool is_first_of_thread(const std::optional<c10::Stream>& stream) {
  thread_local c10::DeviceIndex ready = -1;
  return stream && std::exchange(ready, stream->device_index()) != stream->device_index();
}

bool is_watched() {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return at::GradMode::is_enabled() || !(keys - c10::default_included_set).empty();
}

struct LayerNormLinearBackward : torch::autograd::Node {
  std::array<SavedVariable, COUNT> saved;
  Kernels kernels;
  int64_t context = 0;
  double eps = 0;
  Plain is_plain;
  std::mutex mutex;

  std::string name() const override { return "LayerNormLinearBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(5);
    variable_list inputs;
    inputs.reserve(COUNT);
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (auto& variable : saved) inputs.push_back(variable.unpack());
    }
    variable_list results(5);
    if (!compute(gradients[0], inputs, results)) call_python(gradients[0], inputs, results);
    return results;
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    for (const auto& variable : saved) args.collect(variable, /*is_output=*/false);
    args.collect(eps);
  }

  variable_list apply_with_saved(
      const variable_list& gradients, torch::autograd::SwapSavedVariables& swap) override {
    for (auto& variable : saved) swap.before(variable);
    variable_list results(5);
    if (gradients[0].defined()) {
      variable_list inputs;
      for (auto& variable : saved) inputs.push_back(variable.unpack());
      call_python(gradients[0], inputs, results);
    }
    for (auto& variable : saved) swap.after(variable);
    return results;
  }

 private:
  // Runs the kernels; false where Python has to.
  bool compute(const Tensor& dy, const variable_list& saved, variable_list& results) {
    if (!kernels.backward || is_watched() || is_first_of_thread(is_plain.stream) ||
        current_stream(dy.device()) != is_plain.stream) {
      return false;
    }
    const Tensor bias;
    const Inputs inputs{saved[X], saved[GAMMA], saved[BETA], saved[WEIGHT],
                        bias,     saved[MEAN],  saved[RSTD]};
    // Tensors may have got another memory since the forward, by an assignment to their `data`.
    auto call = call_on(inputs, is_plain, context, eps);
    if (!call || !is_plain(dy, call->M * call->N, inputs.x.scalar_type())) return false;
    call->dy = address(dy);
    void** const addresses[] = {
        &call->dx, &call->dgamma, &call->dbeta, &call->dweight, &call->dbias};
    for (int i = 0; i < 5; ++i) *addresses[i] = task_should_compute_output(i) ? WANTED : nullptr;
    if (kernels.plan_backward(&*call) != 0 || call->way != FUSED) return false;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto& x = inputs.x;
    const auto linear = inputs.weight.options();
    const auto norm = (inputs.norm().defined() ? inputs.norm() : x).options();
    variable_list out(5);
    if (call->dx) out[0] = at::empty(x.sizes(), x.options());
    if (call->dgamma) out[1] = at::empty({call->K}, norm);
    if (call->dbeta) out[2] = at::empty({call->K}, norm);
    if (call->dweight) out[3] = at::empty({call->N, call->K}, linear);
    if (call->dbias) out[4] = at::empty({call->N}, linear);
    for (int i = 0; i < 5; ++i) *addresses[i] = address(out[i]);
    const auto workspace = workspace_of(*call, x);
    if (kernels.backward(&*call) != 0) return false;
    results = std::move(out);
    return true;
  }

  void call_python(const Tensor& dy, const variable_list& inputs, variable_list& results) {
    py::gil_scoped_acquire lock;
    py::list saved_tensors, mask;
    for (const auto& tensor : inputs) {
      saved_tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    }
    for (int i = 0; i < 5; ++i) mask.append(py::cast(task_should_compute_output(i)));
    const auto grad_output = py::reinterpret_steal<py::object>(THPVariable_Wrap(dy));
    const auto returned = py::reinterpret_steal<py::object>(PyObject_CallFunction(
        python_backward, "OOdO", grad_output.ptr(), saved_tensors.ptr(), eps, mask.ptr()));
    if (!returned) py::throw_error();
    for (int i = 0; i < 5; ++i) {
      const auto item = py::reinterpret_steal<py::object>(PySequence_GetItem(returned.ptr(), i));
      if (!item.is_none()) results[i] = THPVariable_Unpack(item.ptr());
    }
  }
};

// PyTorch's pointer to a node: a std::shared_ptr until nodes came to count references themselves.
template <class Pointer>
Pointer own(torch::autograd::Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(node, [](auto* last) { deleteNode(last); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

Tensor tensor_of(PyObject* object) {
  return object == Py_None ? Tensor() : THPVariable_Unpack(object);
}

// Gives y its node.
PyObject* with_node(
    const Tensor& y, const Inputs& inputs, double eps, const Kernels& kernels, int64_t context,
    const Plain& plain) {
  const auto& [x, gamma, beta, weight, bias, mean, rstd] = inputs;
  auto* node = new LayerNormLinearBackward;
  using Pointer = std::decay_t<decltype(y.grad_fn())>;
  const auto owner = own<Pointer>(node);
  node->set_next_edges(torch::autograd::collect_next_edges(x, gamma, beta, weight, bias));
  node->saved = {
      SavedVariable(x, false),      SavedVariable(gamma, false), SavedVariable(beta, false),
      SavedVariable(weight, false), SavedVariable(mean, false),  SavedVariable(rstd, false)};
  node->eps = eps;
  node->kernels = kernels;
  node->context = context;
  node->is_plain = plain;
  torch::autograd::set_history(y, owner);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  torch::autograd::fire_node_creation_hooks(owner);
#endif
  return THPVariable_Wrap(y);
}

// Queues or computes y, mean and rstd; false where the plan leaves the call to Python.
bool compute(
    Call& call, const Kernels& kernels, const Tensor& x, const Tensor& weight, Tensor& y,
    std::optional<py::gil_scoped_release>& without_lock) {
  if (!kernels.forward || kernels.plan_forward(&call) != 0) return false;
  if (call.way != FUSED && call.way != NEW_FOLD) return false;
  c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = weight.size(0);
  y = at::empty(shape, x.options());
  call.y = address(y);
  const auto workspace = workspace_of(call, x);
  // Threads take turns to launch, as they do in Python. A CPU's kernels are all of the work.
  if (!x.is_cpu()) without_lock.reset();
  return kernels.forward(&call) == 0;
}

// Has Python's backends compute y, mean and rstd; false with Python's error set.
bool compute_by_python(PyObject* const* arguments, Tensor& y, Tensor& mean, Tensor& rstd) {
  const at::NoGradGuard no_grad;
  const auto results = py::reinterpret_steal<py::object>(
      PyObject_CallFunctionObjArgs(python_forward, arguments[0], arguments[1], arguments[2],
                                   arguments[3], arguments[4], arguments[5], nullptr));
  if (!results) return false;
  y = THPVariable_Unpack(PyTuple_GetItem(results.ptr(), 0));
  mean = THPVariable_Unpack(PyTuple_GetItem(results.ptr(), 1));
  rstd = THPVariable_Unpack(PyTuple_GetItem(results.ptr(), 2));
  // A view that an op of PyTorch's has made would keep its own history.
  if (y.is_view()) y = y.variable_data();
  return true;
}

// forward(x, gamma, beta, weight, bias, eps, library, context): computes y and gives it its node.
// None where no gradient is wanted, or a tensor is not as kernels need it. The kernels are for x's
// dtype and device; of all else that an assignment to a tensor's `data` changes, nothing is taken
// for granted.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 8, "forward takes 8 arguments");
  std::array<Tensor, 5> tensors;
  for (int i = 0; i < 5; ++i) tensors[i] = tensor_of(arguments[i]);
  const auto& [x, gamma, beta, weight, bias] = tensors;
  const double eps = PyFloat_AsDouble(arguments[5]);
  const Kernels& kernels = Kernels::of(PyUnicode_AsUTF8AndSize(arguments[6], nullptr));
  const int64_t context = PyLong_AsLongLong(arguments[7]);
  const auto requires_grad = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  if (x.layout() != at::kStrided || x.key_set() != weight.key_set() || weight.dim() != 2 ||
      x.dim() == 0 || x.numel() == 0 || weight.numel() == 0 ||
      std::none_of(tensors.begin(), tensors.end(), requires_grad)) {
    Py_RETURN_NONE;
  }
  Tensor y, mean, rstd;
  const Inputs inputs{x, gamma, beta, weight, bias, mean, rstd};
  Plain plain{{}, current_stream(x.device())};
  bool done = false;
  {
    std::optional<py::gil_scoped_release> without_lock(std::in_place);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto statistics = x.options().dtype(statistics_dtype(x.scalar_type()));
    mean = at::empty(x.sizes().slice(0, x.dim() - 1), statistics);
    rstd = at::empty(mean.sizes(), statistics);
    plain.keys = mean.key_set();
    auto call = call_on(inputs, plain, context, eps);
    if (!call) {
      without_lock.reset();
      Py_RETURN_NONE;
    }
    done = compute(*call, kernels, x, weight, y, without_lock);
  }
  if (!done && !compute_by_python(arguments, y, mean, rstd)) return nullptr;
  return with_node(y, inputs, eps, kernels, context, plain);
  END_HANDLE_TH_ERRORS
}

// set_python(forward, backward): what to call as forward(x, gamma, beta, weight, bias, eps) and as
// backward(grad_output, saved, eps, wanted).
PyObject* set_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "set_python takes 2 arguments");
  Py_INCREF(arguments[0]);
  Py_XSETREF(python_forward, arguments[0]);
  Py_INCREF(arguments[1]);
  Py_XSETREF(python_backward, arguments[1]);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"forward", fast(forward), METH_FASTCALL,
     "forward(x, gamma, beta, weight, bias, eps, library, context)"},
    {"set_python", fast(set_python), METH_FASTCALL, "set_python(forward, backward)"},
    {nullptr, nullptr, 0, nullptr}};
#define AS_TEXT_(major, minor) #major "." #minor
#define AS_TEXT(major, minor) AS_TEXT_(major, minor)
constexpr const char* PYTORCH_MINOR_VERSION = AS_TEXT(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "node", "The op and its backward as a node without Python.", -1, methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_node() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  PyObject* created = PyModule_Create2(&module, PYTHON_ABI_VERSION);
  if (created) PyModule_AddStringConstant(created, "TORCH", PYTORCH_MINOR_VERSION);
  return created;
}
