// LayerNorm + Linear without Python: the forward, and the backward as a node of PyTorch's graph.
//
// Python finds out what serves a call and then calls `forward`, or computes y and calls `attach`.
// Both passes allocate their results and call a C function of the kernels' library by its address.
// Whatever is not plain (a second derivative, a compiler or a mode that watches, a tensor of another
// layout) goes back to Python, as does everything on a way without such a function.

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

#include "kernels.h"

namespace {

using namespace fused_norm;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

enum Saved { X, LN_WEIGHT, LN_BIAS, WEIGHT, MEAN, RSTD, COUNT };

PyObject* python_backward = nullptr;

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
    const auto& pass = kernels.backward;
    if (!pass.run || is_watched() || is_first_of_thread(is_plain.stream) ||
        current_stream(dy.device()) != is_plain.stream) {
      return false;
    }
    const Tensor bias;
    const Inputs inputs{saved[X], saved[LN_WEIGHT], saved[LN_BIAS], saved[WEIGHT],
                        bias,     saved[MEAN],      saved[RSTD]};
    // Tensors may have got another memory since the forward, by an assignment to their `data`.
    auto call = call_on(inputs, dy, is_plain, kernels.context, eps);
    if (!call) return false;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto& [x, weight, affine] = std::tie(inputs.x, inputs.weight, inputs.affine());
    const auto options = (affine.defined() ? affine : x).options();
    variable_list out(5);
    if (task_should_compute_output(0)) out[0] = at::empty(x.sizes(), x.options());
    if (task_should_compute_output(1)) out[1] = at::empty({call->K}, options);
    if (task_should_compute_output(2)) out[2] = at::empty({call->K}, options);
    if (task_should_compute_output(3)) out[3] = at::empty({call->N, call->K}, weight.options());
    if (task_should_compute_output(4)) out[4] = at::empty({call->N}, weight.options());
    call->dy = address(dy);
    call->dx = address(out[0]);
    call->dln_weight = address(out[1]);
    call->dln_bias = address(out[2]);
    call->dweight = address(out[3]);
    call->dbias = address(out[4]);
    const auto workspace = workspace_of(pass, *call, x);
    if (!workspace || pass.run(&*call) != 0) return false;
    results = std::move(out);
    return true;
  }

  void call_python(const Tensor& dy, const variable_list& inputs, variable_list& results) {
    pybind11::gil_scoped_acquire lock;
    py::list saved_tensors, mask;
    for (const auto& tensor : inputs) {
      saved_tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    }
    for (int i = 0; i < 5; ++i) mask.append(py::bool_(task_should_compute_output(i)));
    const auto grad_output = py::reinterpret_steal<py::object>(THPVariable_Wrap(dy));
    const auto returned = py::reinterpret_steal<py::object>(PyObject_CallFunction(
        python_backward, "OOdO", grad_output.ptr(), saved_tensors.ptr(), eps, mask.ptr()));
    if (!returned) {
      python_error error;
      error.persist();
      throw std::move(error);
    }
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

// The addresses of each pass's two functions, and their context, from a tuple or None.
Kernels kernels_of(PyObject* tuple) {
  if (tuple == Py_None) return {};
  const auto word = [&](int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)); };
  const auto function = [&](int i) { return reinterpret_cast<Function>(word(i)); };
  return {{function(0), function(1)}, {function(2), function(3)}, word(4)};
}

// Gives y its node.
PyObject* with_node(
    const Tensor& y, const Inputs& inputs, double eps, const Kernels& kernels, const Plain& plain) {
  const auto& [x, ln_weight, ln_bias, weight, bias, mean, rstd] = inputs;
  auto* node = new LayerNormLinearBackward;
  using Pointer = std::decay_t<decltype(y.grad_fn())>;
  const auto owner = own<Pointer>(node);
  node->set_next_edges(
      torch::autograd::collect_next_edges(x, ln_weight, ln_bias, weight, bias));
  node->saved = {
      SavedVariable(x, false),      SavedVariable(ln_weight, false), SavedVariable(ln_bias, false),
      SavedVariable(weight, false), SavedVariable(mean, false),      SavedVariable(rstd, false)};
  node->eps = eps;
  node->kernels = kernels;
  node->is_plain = plain;
  torch::autograd::set_history(y, owner);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  torch::autograd::fire_node_creation_hooks(owner);
#endif
  return THPVariable_Wrap(y);
}

// attach(y, x, ln_weight, ln_bias, linear_weight, linear_bias, mean, rstd, eps, kernels): gives y
// its node and returns it. `kernels` is None, or as in `kernels_of`.
PyObject* attach(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 10, "attach takes 10 arguments");
  std::array<Tensor, 8> tensors;
  for (int i = 0; i < 8; ++i) tensors[i] = tensor_of(arguments[i]);
  auto& [y, x, ln_weight, ln_bias, weight, bias, mean, rstd] = tensors;
  // A view that an op of PyTorch's has made would keep its own history.
  if (y.is_view()) y = y.variable_data();
  const Inputs inputs{x, ln_weight, ln_bias, weight, bias, mean, rstd};
  const Plain plain{y.key_set(), current_stream(y.device())};
  return with_node(y, inputs, PyFloat_AsDouble(arguments[8]), kernels_of(arguments[9]), plain);
  END_HANDLE_TH_ERRORS
}

// forward(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, kernels): computes y and gives it
// its node. None where no gradient is wanted, or Python has to. The kernels are for x's dtype and
// device; of all else that an assignment to a tensor's `data` changes, nothing is taken for granted.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 7, "forward takes 7 arguments");
  std::array<Tensor, 5> tensors;
  for (int i = 0; i < 5; ++i) tensors[i] = tensor_of(arguments[i]);
  const auto& [x, ln_weight, ln_bias, weight, bias] = tensors;
  const double eps = PyFloat_AsDouble(arguments[5]);
  const Kernels kernels = kernels_of(arguments[6]);
  const auto requires_grad = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  if (!kernels.forward.run || x.layout() != at::kStrided || x.key_set() != weight.key_set() ||
      weight.dim() != 2 || x.dim() == 0 || x.numel() == 0 || weight.numel() == 0 ||
      std::none_of(tensors.begin(), tensors.end(), requires_grad)) {
    Py_RETURN_NONE;
  }
  Tensor y, mean, rstd;
  const Inputs inputs{x, ln_weight, ln_bias, weight, bias, mean, rstd};
  Plain plain{{}, current_stream(x.device())};
  bool done = false;
  {
    std::optional<pybind11::gil_scoped_release> without_lock(std::in_place);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto statistics = x.options().dtype(statistics_dtype(x.scalar_type()));
    c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = weight.size(0);
    y = at::empty(shape, x.options());
    mean = at::empty(x.sizes().slice(0, x.dim() - 1), statistics);
    rstd = at::empty(mean.sizes(), statistics);
    plain.keys = y.key_set();
    auto call = call_on(inputs, y, plain, kernels.context, eps);
    if (call) call->y = address(y);
    if (const auto workspace = call ? workspace_of(kernels.forward, *call, x) : std::nullopt) {
      // Threads take turns to launch, as they do in Python. A CPU's kernels are all of the work.
      if (!x.is_cpu()) without_lock.reset();
      done = kernels.forward.run(&*call) == 0;
    }
  }
  if (!done) Py_RETURN_NONE;
  return with_node(y, inputs, eps, kernels, plain);
  END_HANDLE_TH_ERRORS
}

// set_python_backward(function): what to call as function(grad_output, saved, eps, mask).
PyObject* set_python_backward(PyObject*, PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(python_backward, function);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"attach", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(attach)), METH_FASTCALL,
     "attach(y, x, ln_weight, ln_bias, linear_weight, linear_bias, mean, rstd, eps, kernels)"},
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL,
     "forward(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, kernels)"},
    {"set_python_backward", set_python_backward, METH_O, "set_python_backward(function)"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "autograd", "The backward as a node without Python.", -1, methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_autograd() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return PyModule_Create(&module);
}
