// The backward of LayerNorm + Linear as a node of PyTorch's graph that runs without Python.
//
// The forward stays in Python, which then calls `attach`. The node allocates the gradients and
// calls a C function of the kernels' library by its address. Whatever is not plain (a second
// derivative, a compiler or a mode that watches, a tensor of another layout) goes back to Python,
// as does everything on a way without such a function.

#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// `BackwardCall` in op/layernorm_linear/backward_call.mojo.
struct Call {
  void *dx, *dln_weight, *dln_bias, *dweight, *dbias, *dy, *x, *ln_weight, *ln_bias, *weight;
  void *mean, *rstd, *workspace;
  int64_t M, K, N, ln_is_float32, threads, context;
  double eps;
};
using Function = int64_t (*)(const Call*);

// What Python knows of a way. Both functions are null where a way has none.
struct Kernels {
  Function workspace = nullptr;  // bytes, or negative if the call is for Python
  Function backward = nullptr;   // 0, or what else makes it a call for Python
  int64_t context = 0;
};

enum Saved { X, LN_WEIGHT, LN_BIAS, WEIGHT, MEAN, RSTD, COUNT };

PyObject* python_backward = nullptr;
std::atomic<bool> forked{false};

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

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void* address(const Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

struct LayerNormLinearBackward : torch::autograd::Node {
  std::array<SavedVariable, COUNT> saved;
  Kernels kernels;
  double eps = 0;
  c10::DispatchKeySet keys;
  std::optional<c10::Stream> stream;
  std::mutex mutex;

  std::string name() const override { return "LayerNormLinearBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(5);
    variable_list inputs;
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
  bool compute(const Tensor& dy, const variable_list& inputs, variable_list& results) {
    if (!kernels.backward || is_watched() || is_first_of_thread(stream)) return false;
    const auto& [x, gamma, beta, weight] =
        std::tie(inputs[X], inputs[LN_WEIGHT], inputs[LN_BIAS], inputs[WEIGHT]);
    // Tensors may have got another memory since the forward, by an assignment to their `data`.
    if (weight.dim() != 2 || current_stream(dy.device()) != stream) return false;
    const int64_t N = weight.size(0), K = weight.size(1), M = inputs[MEAN].numel();
    const auto dtype = x.scalar_type();
    const auto& affine = gamma.defined() ? gamma : beta;
    const auto affine_dtype = affine.defined() ? affine.scalar_type() : dtype;
    const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    if (!is_plain(dy, M * N, dtype) || !is_plain(x, M * K, dtype) ||
        !is_plain(weight, N * K, dtype) || !is_plain(inputs[MEAN], M, wide) ||
        !is_plain(inputs[RSTD], M, wide) ||
        (gamma.defined() && !is_plain(gamma, K, affine_dtype)) ||
        (beta.defined() && !is_plain(beta, K, affine_dtype)) ||
        (affine_dtype != dtype && affine_dtype != at::kFloat)) {
      return false;
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto affine_options = affine.defined() ? affine.options() : x.options();
    variable_list out(5);
    if (task_should_compute_output(0)) out[0] = at::empty(x.sizes(), x.options());
    if (task_should_compute_output(1)) out[1] = at::empty({K}, affine_options);
    if (task_should_compute_output(2)) out[2] = at::empty({K}, affine_options);
    if (task_should_compute_output(3)) out[3] = at::empty({N, K}, weight.options());
    if (task_should_compute_output(4)) out[4] = at::empty({N}, weight.options());
    Call call{
        address(out[0]), address(out[1]), address(out[2]), address(out[3]), address(out[4]),
        address(dy), address(x), address(gamma), address(beta), address(weight),
        address(inputs[MEAN]), address(inputs[RSTD]), nullptr,
        M, K, N, affine_dtype != dtype, forked ? 1 : at::get_num_threads(), kernels.context, eps};
    const int64_t size = kernels.workspace(&call);
    if (size < 0) return false;
    Tensor workspace;
    if (size > 0) workspace = at::empty({size}, x.options().dtype(at::kByte));
    call.workspace = address(workspace);
    if (kernels.backward(&call) != 0) return false;
    results = std::move(out);
    return true;
  }

  bool is_plain(const Tensor& tensor, int64_t count, at::ScalarType dtype) const {
    return tensor.key_set() == keys && tensor.scalar_type() == dtype &&
        tensor.numel() == count && tensor.is_contiguous() &&
        (!stream || tensor.device() == stream->device()) &&
        !torch::autograd::isFwGradDefined(tensor);
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

// attach(y, x, ln_weight, ln_bias, linear_weight, linear_bias, mean, rstd, eps, kernels): gives y
// its node and returns it. `kernels` are the addresses of both functions and their context, or None.
PyObject* attach(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 10, "attach takes 10 arguments");
  std::array<Tensor, 8> tensors;
  for (int i = 0; i < 8; ++i) tensors[i] = tensor_of(arguments[i]);
  // A view that an op of PyTorch's has made would keep its own history.
  if (tensors[0].is_view()) tensors[0] = tensors[0].variable_data();
  const auto& [y, x, ln_weight, ln_bias, weight, bias, mean, rstd] = tensors;
  auto* node = new LayerNormLinearBackward;
  using Pointer = std::decay_t<decltype(y.grad_fn())>;
  const auto owner = own<Pointer>(node);
  node->set_next_edges(
      torch::autograd::collect_next_edges(x, ln_weight, ln_bias, weight, bias));
  node->saved = {
      SavedVariable(x, false),      SavedVariable(ln_weight, false), SavedVariable(ln_bias, false),
      SavedVariable(weight, false), SavedVariable(mean, false),      SavedVariable(rstd, false)};
  node->eps = PyFloat_AsDouble(arguments[8]);
  if (PyObject* kernels = arguments[9]; kernels != Py_None) {
    const auto word = [&](int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(kernels, i)); };
    node->kernels = {
        reinterpret_cast<Function>(word(0)), reinterpret_cast<Function>(word(1)), word(2)};
    node->keys = y.key_set();
    node->stream = current_stream(y.device());
  }
  torch::autograd::set_history(y, owner);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  torch::autograd::fire_node_creation_hooks(owner);
#endif
  return THPVariable_Wrap(y);
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
    {"set_python_backward", set_python_backward, METH_O, "set_python_backward(function)"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "autograd", "The backward as a node without Python.", -1, methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_autograd() {
  // OpenMP's workers do not survive a fork, and waiting for them would hang.
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return PyModule_Create(&module);
}
