// A call and its backward as a node of PyTorch's graph, without Python, which saves a training step the
// time of `torch.autograd.Function`. It keeps tensors and calls the chain, and is the only part bound to
// a version of PyTorch. Second derivatives, compilers, modes and unsupported layouts are left to Python.
// It uses only Python's stable ABI: one build serves every version.

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/version.h>

#include "chain.h"

namespace fused_norm {

using at::Tensor;
using Tensors = c10::SmallVector<Tensor, 16>;
using Handles = c10::SmallVector<AtenTensorHandle, 24>;
using Flags = c10::SmallVector<uint8_t, 16>;
using torch::autograd::variable_list;
// A std::shared_ptr if nodes do not count references themselves.
using NodePointer = std::decay_t<decltype(std::declval<Tensor>().grad_fn())>;

const Chain* chain;
// gradients(spec, tensors, grad_outputs, needed), and whether no collective is running.
PyObject *python_backward, *python_is_alone;

// Raises Python's exception in C++.
THPObjectPtr checked(PyObject* object) {
  if (object) return THPObjectPtr(object);
  python_error error;
  error.persist();
  throw std::move(error);
}

THPObjectPtr tuple_of(at::ArrayRef<Tensor> tensors) {
  auto tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto item = checked(THPVariable_Wrap(tensors[i]));
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), item.release());
  }
  return tuple;
}

THPObjectPtr bytes_of(const void* values, size_t size) {
  return checked(PyBytes_FromStringAndSize(
      static_cast<const char*>(values), static_cast<Py_ssize_t>(size)));
}

// A handle of the stable ABI is the address of a tensor.
Handles handles_of(at::ArrayRef<Tensor> tensors) {
  Handles handles;
  for (const Tensor& t : tensors) {
    handles.push_back(
        t.defined() ? reinterpret_cast<AtenTensorHandle>(const_cast<Tensor*>(&t)) : nullptr);
  }
  return handles;
}

// The tensors that the chain allocated; none if it leaves the call to Python.
Tensors taken(int status, const Handles& made) {
  if (status == FAILED && std::strstr(chain->error(), "out of memory")) {
    C10_THROW_ERROR(OutOfMemoryError, chain->error());
  }
  TORCH_CHECK(status != FAILED, chain->error());
  if (status != DONE) return {};
  Tensors tensors(made.size());
  for (size_t i = 0; i < made.size(); ++i) {
    const std::unique_ptr<Tensor> tensor(reinterpret_cast<Tensor*>(made[i]));
    if (tensor) tensors[i] = std::move(*tensor);
  }
  return tensors;
}

// With the GIL held.
Conditions conditions_of(const Tensor& x) {
  if (x.is_cpu()) return {1, 0};
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return {checked(PyObject_CallNoArgs(python_is_alone)).get() == Py_True,
          precision == at::Float32Precision::TF32};
}

// Whether tensors are ordinary ones on one device, and no transform, tracer or mode would intercept
// PyTorch's own ops: the chain checks the rest.
bool are_ordinary(at::ArrayRef<Tensor> tensors, const Tensor& like) {
  const auto watching = c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set;
  const c10::DispatchKeySet plain(like.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  return watching.empty() && std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& v) {
    if (!v.defined()) return true;
    const auto keys = v.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
        c10::autocast_dispatch_keyset;
    return keys == plain && v.device() == like.device() && !torch::autograd::isFwGradDefined(v);
  });
}

template <class Pointer>
Pointer own(torch::autograd::Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(node, [](auto* last) { deleteNode(last); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

class NormLinearBackward : public torch::autograd::Node {
 public:
  NormLinearBackward(const Spec& spec, Conditions conditions, const Tensors& t)
      : spec_(spec), conditions_(conditions), adds_x_(adds_x(t)), edges_(t.size(), -1) {
    torch::autograd::edge_list edges;
    edges.reserve(t.size());
    for (size_t place = 0; place < t.size(); ++place) {
      if (!t[place].defined() || place == MEAN || place == RSTD) continue;
      if (adds_x_ && place == OUT_RESIDUAL) continue;
      edges_[place] = static_cast<int>(edges.size());
      edges.push_back(torch::autograd::impl::gradient_edge(t[place]));
    }
    set_next_edges(std::move(edges));
  }

  // Keeps what the backward needs, once the results have this node: the same tensors in the same order as
  // Python's function, so that either may recompute what the other saved in a checkpoint.
  void save(Tensors t, at::ArrayRef<Tensor> results) {
    const auto extras = results.slice(count());
    const bool has_sum = extras[SUM].defined();
    if (has_sum) t[X] = extras[SUM];
    if (extras[KEPT_MEAN].defined()) t[MEAN] = extras[KEPT_MEAN];
    if (extras[KEPT_RSTD].defined()) t[RSTD] = extras[KEPT_RSTD];
    for (const Place place : {RESIDUAL, OUT_BIAS, OUT_RESIDUAL}) t[place].reset();
    // Only gradients of what follows the products depend on biases.
    if (!spec_.activation && !t[OUT_WEIGHT].defined()) std::fill(t.begin() + NAMED + count(), t.end(), Tensor());
    t.append(extras.begin() + EXTRAS, extras.end());
    saved_.reserve(t.size());
    for (size_t place = 0; place < t.size(); ++place) {
      if (!t[place].defined()) continue;
      places_.push_back(static_cast<int>(place));
      saved_.emplace_back(t[place], has_sum && place == X);
    }
  }

  std::string name() const override {
    if (spec_.normalization == TRAINABLE_EPS) return "TrainableEpsLayerNormBackward";
    return edges_[OUT_WEIGHT] < 0 ? "NormLinearBackward" : "NormMlpBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved_) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    return applied(gradients, true);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    // One of them, the sum, may be a result.
    args.collect(saved_, /*is_output=*/true);
    for (const auto& numbers : {edges_, places_}) args.collect(at::ArrayRef<int>(numbers));
    args.collect(std::string(reinterpret_cast<const char*>(&spec_), sizeof spec_));
    args.collect(adds_x_);
  }

  variable_list apply_with_saved(
      const variable_list& gradients, torch::autograd::SwapSavedVariables& swap) override {
    swap.before(saved_);
    auto results = applied(gradients, false);
    swap.after(saved_);
    return results;
  }

 private:
  size_t count() const { return (edges_.size() - NAMED) / 2; }

  // Whether what is normalized is added to the output, too.
  static bool adds_x(const Tensors& t) {
    return t[OUT_RESIDUAL].is_same(t[X]) && !t[RESIDUAL].defined();
  }

  // The same as `with_sum` in ops/norm_linear.py: x, added to the output, has the gradient that a
  // result which is x would have.
  variable_list with_sum(variable_list gradients) const {
    gradients.insert(gradients.end() - spec_.returns_norm, gradients.front());
    return gradients;
  }

  variable_list applied(const variable_list& given, bool may_compute) {
    variable_list results(num_outputs());
    const auto defined = std::count_if(
        given.begin(), given.end(), [](const Tensor& g) { return g.defined(); });
    if (!defined) return results;
    const auto gradients = adds_x_ ? with_sum(given) : given;
    Spec spec = spec_;
    spec.returns_sum |= adds_x_;
    Flags needed(edges_.size());
    for (size_t place = 0; place < needed.size(); ++place) {
      needed[place] = edges_[place] >= 0 && task_should_compute_output(edges_[place]);
    }
    Tensors found;
    const size_t sum = gradients.size() - 1 - spec_.returns_norm;
    if (defined == 1 && spec_.returns_sum && gradients[sum].defined()) {
      // The gradient of the sum alone is its summands', even if saved tensors have been overwritten.
      found.resize(needed.size());
      found[X] = found[RESIDUAL] = gradients[sum];
    } else {
      const auto t = unpacked();
      if (may_compute) found = computed(spec, t, gradients, needed);
      if (found.empty()) found = call_python(spec, t, gradients, needed);
    }
    for (size_t place = 0; place < found.size(); ++place) {
      if (needed[place]) results[edges_[place]] = std::move(found[place]);
    }
    return results;
  }

  Tensors unpacked() {
    Tensors t(std::max<size_t>(edges_.size(), places_.back() + 1));
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < saved_.size(); ++i) t[places_[i]] = saved_[i].unpack(getptr());
    return t;
  }

  // The gradients by place, from the chain; none if Python has to compute them.
  Tensors computed(
      const Spec& spec, const Tensors& t, const variable_list& gradients,
      const Flags& needed) const {
    const Tensor& x = t[X];
    if (at::GradMode::is_enabled() || !are_ordinary(t, x) || !are_ordinary(gradients, x)) return {};
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto tensors = handles_of(t), grads = handles_of(gradients);
    Handles made(needed.size());
    const int status = chain->backward(
        &spec, conditions_, count(), tensors.size(), tensors.data(), grads.size(), grads.data(),
        needed.data(), made.data());
    return taken(status, made);
  }

  Tensors call_python(
      const Spec& spec, const Tensors& t, const variable_list& gradients,
      const Flags& needed) const {
    const pybind11::gil_scoped_acquire lock;
    auto found = checked(PyObject_CallFunction(
        python_backward, "NNNN", bytes_of(&spec, sizeof spec).release(), tuple_of(t).release(),
        tuple_of(gradients).release(), bytes_of(needed.data(), needed.size()).release()));
    Tensors results(needed.size());
    for (size_t i = 0; i < results.size(); ++i) {
      auto item = checked(PySequence_GetItem(found.get(), static_cast<Py_ssize_t>(i)));
      if (item.get() != Py_None) results[i] = THPVariable_Unpack(item.get());
    }
    return results;
  }

  Spec spec_;
  Conditions conditions_;
  bool adds_x_;
  // The edge of each place, -1 for none; the place of each saved tensor, with products at the end.
  c10::SmallVector<int, 16> edges_, places_;
  std::vector<torch::autograd::SavedVariable> saved_;
};

// Computes a call and gives its results their node: the outputs, the sum and the normalized rows,
// undefined if not wanted. None if the call is left to Python.
Tensors call(Spec spec, const Tensors& t) {
  const Tensor& x = t[X];
  if (!(x.is_cpu() || x.is_cuda()) || !are_ordinary(t, x) ||
      at::autocast::is_autocast_enabled(x.device().type())) {
    return {};
  }
  const bool wants_sum = spec.returns_sum;
  const bool keeps = at::GradMode::is_enabled() &&
      std::any_of(t.begin(), t.end(), [](const Tensor& v) { return v.defined() && v.requires_grad(); });
  // Saved tensors have to be inputs or results: second derivatives reach x through them.
  spec.returns_sum = t[RESIDUAL].defined() && (keeps || wants_sum);
  const auto conditions = conditions_of(x);
  const size_t count = (t.size() - NAMED) / 2, returned = count + KEPT_MEAN;
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (record.isActive() && count) {
    record.before(t[OUT_WEIGHT].defined() ? "fused_norm::norm_mlp" : "fused_norm::norm_linear");
  }
  Tensors results;
  {
    const pybind11::gil_scoped_release without_lock;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto tensors = handles_of(t);
    Handles made(2 * count + EXTRAS);
    const int status =
        chain->forward(&spec, conditions, count, tensors.data(), keeps, made.data());
    results = taken(status, made);
  }
  if (results.empty()) return {};
  if (keeps) {
    auto* node = new NormLinearBackward(spec, conditions, t);
    const auto owner = own<NodePointer>(node);
    for (size_t i = 0; i < returned; ++i) {
      if (results[i].defined()) torch::autograd::set_history(results[i], owner);
    }
    node->save(t, results);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
    torch::autograd::fire_node_creation_hooks(owner);
#endif
  }
  // The sum is x if nothing was added.
  Tensor& sum = results[count + SUM];
  if (!wants_sum) sum.reset();
  if (wants_sum && !sum.defined()) sum = x;
  results.resize(returned);
  return results;
}

// forward(spec, *tensors): one tensor, or a tuple of them. None if it is left to Python.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const bool has_spec = count > NAMED && PyBytes_Size(arguments[0]) == sizeof(Spec);
  TORCH_CHECK(has_spec, "forward takes a spec and tensors");
  Spec spec;
  std::memcpy(&spec, PyBytes_AsString(arguments[0]), sizeof spec);
  Tensors t;
  for (PyObject* const object : at::ArrayRef<PyObject*>(arguments + 1, count - 1)) {
    const bool is_tensor = THPVariable_CheckExact(object);
    if (!is_tensor && object != Py_None) Py_RETURN_NONE;
    t.push_back(is_tensor ? THPVariable_Unpack(object) : Tensor());
  }
  auto results = call(spec, t);
  const auto is_absent = [](const Tensor& v) { return !v.defined(); };
  results.erase(std::remove_if(results.begin(), results.end(), is_absent), results.end());
  if (results.empty()) Py_RETURN_NONE;
  return results.size() == 1 ? THPVariable_Wrap(results[0]) : tuple_of(results).release();
  END_HANDLE_TH_ERRORS
}

// set_chain(address, backward, is_alone): what this module calls.
PyObject* set_chain(PyObject*, PyObject* arguments) {
  PyObject *address, *backward, *is_alone;
  if (!PyArg_ParseTuple(arguments, "OOO", &address, &backward, &is_alone)) return nullptr;
  chain = static_cast<const Chain*>(PyLong_AsVoidPtr(address));
  for (PyObject* const kept : {backward, is_alone}) Py_IncRef(kept);
  Py_DecRef(std::exchange(python_backward, backward));
  Py_DecRef(std::exchange(python_is_alone, is_alone));
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL,
     "forward(spec, *tensors)"},
    {"set_chain", set_chain, METH_VARARGS, "set_chain(address, backward, is_alone)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "fused_norm_node", "Calls of the op family with a node of C++.", -1,
    methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace fused_norm

PyMODINIT_FUNC PyInit_fused_norm_node() {
  PyObject* created = PyModule_Create2(&fused_norm::module, PYTHON_ABI_VERSION);
  if (created) PyModule_AddStringConstant(created, "TORCH", TORCH_VERSION);
  return created;
}
