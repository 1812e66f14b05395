// A call and its backward as a node of PyTorch's graph, without Python. It keeps tensors and calls the
// chain, and is all that is bound to a version of PyTorch: it saves the time that
// `torch.autograd.Function` takes. What is not plain (a second derivative, a compiler or a mode that
// watches, a tensor of another spec) it leaves to Python. Of Python's objects it knows what the
// stable ABI tells: one build serves every version of Python.

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include "chain.h"

namespace fused_norm {

using at::Tensor;
using Tensors = c10::SmallVector<Tensor, 16>;
using Handles = c10::SmallVector<AtenTensorHandle, 24>;
using torch::autograd::variable_list;
// A std::shared_ptr where nodes do not count references themselves.
using NodePointer = std::decay_t<decltype(std::declval<Tensor>().grad_fn())>;

namespace chain {
ChainForward forward;
ChainBackward backward;
ChainError error;
}  // namespace chain

// gradients(spec, tensors, products, grad_outputs, needed), and whether no collective runs meanwhile.
PyObject *python_backward, *python_is_alone;

struct Release {
  void operator()(PyObject* object) const { Py_DecRef(object); }
};
using Object = std::unique_ptr<PyObject, Release>;

// Raises in C++ what Python has raised.
Object checked(PyObject* object) {
  if (object) return Object(object);
  python_error error;
  error.persist();
  throw std::move(error);
}

struct WithLock {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithLock() { PyGILState_Release(state); }
};

struct WithoutLock {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutLock() { PyEval_RestoreThread(state); }
};

template <class Values, class Wrap>
Object list_of(const Values& values, Wrap wrap) {
  auto list = checked(PyList_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; i < values.size(); ++i) {
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), checked(wrap(values[i])).release());
  }
  return list;
}

// The items of a list or tuple, or the one thing that is neither.
c10::SmallVector<PyObject*, 4> items_of(PyObject* object) {
  const auto type = PyType_GetFlags(Py_TYPE(object));
  const bool is_list = type & Py_TPFLAGS_LIST_SUBCLASS;
  if (!is_list && !(type & Py_TPFLAGS_TUPLE_SUBCLASS)) return {object};
  c10::SmallVector<PyObject*, 4> items(is_list ? PyList_Size(object) : PyTuple_Size(object));
  for (size_t i = 0; i < items.size(); ++i) {
    items[i] = is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i);
  }
  return items;
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

Tensor taken(AtenTensorHandle handle) {
  const std::unique_ptr<Tensor> tensor(reinterpret_cast<Tensor*>(handle));
  return tensor ? std::move(*tensor) : Tensor();
}

// Whether the chain has done it; false where that is left to Python.
bool is_done(int status) {
  if (status == FAILED && std::strstr(chain::error(), "out of memory")) {
    C10_THROW_ERROR(OutOfMemoryError, chain::error());
  }
  TORCH_CHECK(status != FAILED, chain::error());
  return status == DONE;
}

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// With Python's lock.
Conditions conditions_of(const Tensor& x) {
  if (x.is_cpu()) return {1, 0};
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return {checked(PyObject_CallNoArgs(python_is_alone)).get() == Py_True,
          precision == at::Float32Precision::TF32};
}

// Whether a transform, a tracer or a mode would see PyTorch's own ops.
bool is_watched() {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return !(keys - c10::default_included_set).empty();
}

// Whether tensors are ordinary ones of one device: the chain looks at the rest.
bool are_ordinary(at::ArrayRef<Tensor> tensors, const Tensor& like) {
  const c10::DispatchKeySet plain(like.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& v) {
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
  NormLinearBackward(const Spec& spec, const Tensors& t, Conditions conditions)
      : spec_(spec), conditions_(conditions), stream_(current_stream(t[X].device())),
        has_sum_(t[RESIDUAL].defined()), edges_(t.size()) {
    torch::autograd::edge_list edges;
    edges.reserve(t.size());
    for (size_t place = 0; place < t.size(); ++place) {
      edges_[place] = -1;
      if (!t[place].defined() || place == MEAN || place == RSTD) continue;
      edges_[place] = static_cast<int>(edges.size());
      edges.push_back(torch::autograd::impl::gradient_edge(t[place]));
    }
    set_next_edges(std::move(edges));
  }

  size_t count() const { return (edges_.size() - NAMED) / 2; }

  // Keeps what the backward needs, once the results have this node: what Python's function keeps, in
  // the same order, so that of a checkpoint one may compute what the other did.
  void save(const Tensors& t, at::ArrayRef<Tensor> results) {
    const auto keep = [&](size_t place, const Tensor& tensor, bool is_output = false) {
      if (!tensor.defined()) return;
      places_.push_back(static_cast<int>(place));
      saved_.emplace_back(tensor, is_output);
    };
    const auto or_given = [&](Extra extra, Place place) {
      const Tensor& made = results[count() + extra];
      return made.defined() ? made : t[place];
    };
    saved_.reserve(t.size() + count());
    keep(X, or_given(SUM, X), results[count() + SUM].defined());
    for (size_t place = GAMMA; place < MEAN; ++place) keep(place, t[place]);
    keep(MEAN, or_given(KEPT_MEAN, MEAN));
    keep(RSTD, or_given(KEPT_RSTD, RSTD));
    keep(OUT_WEIGHT, t[OUT_WEIGHT]);
    // Only an activation's gradient depends on biases.
    const size_t end = spec_.activation ? t.size() : NAMED + count();
    for (size_t place = NAMED; place < end; ++place) keep(place, t[place]);
    for (const auto& h : results.slice(count() + EXTRAS)) keep(t.size(), h);
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
    for (size_t i = 0; i < saved_.size(); ++i) {
      // Of x and what is added to it the sum is saved, which is a result.
      args.collect(saved_[i], /*is_output=*/places_[i] == X && has_sum_);
    }
    for (const int place : places_) args.collect(static_cast<int64_t>(place));
    for (const int edge : edges_) args.collect(static_cast<int64_t>(edge));
    args.collect(spec_.eps);
    args.collect(spec_.weight_offset);
    args.collect(spec_.normalization);
    args.collect(spec_.activation);
    for (const bool flag :
         {spec_.is_joined, spec_.returns_sum, spec_.returns_norm, spec_.recompute}) {
      args.collect(flag);
    }
  }

  variable_list apply_with_saved(
      const variable_list& gradients, torch::autograd::SwapSavedVariables& swap) override {
    for (auto& variable : saved_) swap.before(variable);
    auto results = applied(gradients, false);
    for (auto& variable : saved_) swap.after(variable);
    return results;
  }

 private:
  variable_list applied(const variable_list& gradients, bool may_compute) {
    std::vector<uint8_t> needed(edges_.size());
    for (size_t place = 0; place < needed.size(); ++place) {
      needed[place] = edges_[place] >= 0 && task_should_compute_output(edges_[place]);
    }
    variable_list results(num_outputs());
    const size_t sum = gradients.size() - 1 - spec_.returns_norm;
    size_t defined = 0;
    for (const auto& g : gradients) defined += g.defined();
    if (!defined) return results;
    if (defined == 1 && spec_.returns_sum && gradients[sum].defined()) {
      // The sum's alone is that of its summands, whatever became of what is saved.
      for (const size_t place : {X, RESIDUAL}) {
        if (needed[place]) results[edges_[place]] = gradients[sum];
      }
      return results;
    }
    const auto [t, products] = unpacked();
    auto found = may_compute ? computed(t, products, gradients, needed) : Tensors();
    if (found.empty()) found = call_python(t, products, gradients, needed);
    for (size_t place = 0; place < found.size(); ++place) {
      if (needed[place]) results[edges_[place]] = std::move(found[place]);
    }
    return results;
  }

  std::pair<Tensors, Tensors> unpacked() {
    std::pair<Tensors, Tensors> both(Tensors(edges_.size()), Tensors());
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < saved_.size(); ++i) {
      auto tensor = saved_[i].unpack(getptr());
      if (places_[i] < static_cast<int>(edges_.size())) {
        both.first[places_[i]] = std::move(tensor);
      } else {
        both.second.push_back(std::move(tensor));
      }
    }
    return both;
  }

  // The gradients by place, of the chain; none where Python has to find them.
  Tensors computed(
      const Tensors& t, const Tensors& products, const variable_list& gradients,
      const std::vector<uint8_t>& needed) const {
    const Tensor& x = t[X];
    if (at::GradMode::is_enabled() || is_watched() || current_stream(x.device()) != stream_ ||
        !are_ordinary(t, x) || !are_ordinary(gradients, x)) {
      return {};
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto tensors = handles_of(t), kept = handles_of(products), grads = handles_of(gradients);
    Handles made(t.size());
    const auto status = chain::backward(
        &spec_, conditions_, static_cast<int64_t>(count()), tensors.data(),
        static_cast<int64_t>(kept.size()), kept.data(), static_cast<int64_t>(grads.size()),
        grads.data(), needed.data(), made.data());
    Tensors found;
    if (is_done(status)) std::transform(made.begin(), made.end(), std::back_inserter(found), taken);
    return found;
  }

  Tensors call_python(
      const Tensors& t, const Tensors& products, const variable_list& gradients,
      const std::vector<uint8_t>& needed) const {
    const WithLock lock;
    const auto wrap = [](const Tensor& v) { return THPVariable_Wrap(v); };
    const auto flag = [](bool v) { return PyBool_FromLong(v); };
    const auto found = checked(PyObject_CallFunction(
        python_backward, "(LLddNNNN)NNNN", static_cast<long long>(spec_.normalization),
        static_cast<long long>(spec_.activation), spec_.eps, spec_.weight_offset,
        flag(spec_.is_joined), flag(spec_.returns_sum), flag(spec_.returns_norm),
        flag(spec_.recompute), list_of(t, wrap).release(), list_of(products, wrap).release(),
        list_of(gradients, wrap).release(), list_of(needed, flag).release()));
    Tensors results(t.size());
    for (size_t i = 0; i < results.size(); ++i) {
      const auto item = checked(PySequence_GetItem(found.get(), static_cast<Py_ssize_t>(i)));
      if (item.get() != Py_None) results[i] = THPVariable_Unpack(item.get());
    }
    return results;
  }

  Spec spec_;
  Conditions conditions_;
  std::optional<c10::Stream> stream_;
  bool has_sum_;
  // The edge of each place, -1 for none; and the place of each tensor saved, past the last for a
  // product.
  c10::SmallVector<int, 16> edges_, places_;
  std::vector<torch::autograd::SavedVariable> saved_;
  std::mutex mutex_;
};

// Where the arguments of `forward` stand after the tensors by name.
enum Argument {
  WEIGHT = NAMED, BIAS, NORMALIZATION, ACTIVATION, EPS, OFFSET, IS_JOINED, RETURN_SUM, RETURN_NORM,
  RECOMPUTE, ARGUMENTS
};

// The tensors in the chain's order, undefined for None; none where one is not ordinary.
Tensors tensors_of(PyObject* const* arguments) {
  const auto weights = items_of(arguments[WEIGHT]), biases = items_of(arguments[BIAS]);
  const bool has_biases = arguments[BIAS] != Py_None;
  if (weights.empty() || (has_biases && biases.size() != weights.size())) return {};
  Tensors t;
  const auto take = [&](PyObject* object) {
    const bool is_tensor = THPVariable_CheckExact(object);
    t.push_back(is_tensor ? THPVariable_Unpack(object) : Tensor());
    return is_tensor || object == Py_None;
  };
  bool is_right = std::all_of(arguments, arguments + NAMED, take) && t[X].defined();
  is_right = is_right && std::all_of(weights.begin(), weights.end(), take);
  for (size_t i = 0; is_right && i < weights.size(); ++i) {
    is_right = take(has_biases ? biases[i] : Py_None) && t[NAMED + i].defined();
  }
  return is_right ? t : Tensors();
}

// What is to be computed; nothing where an argument has another type.
std::optional<Spec> spec_of(PyObject* const* arguments) {
  if (!PyFloat_CheckExact(arguments[EPS]) || !PyFloat_CheckExact(arguments[OFFSET])) {
    return std::nullopt;
  }
  Spec spec;
  spec.normalization = PyLong_AsLong(arguments[NORMALIZATION]);
  spec.activation = PyLong_AsLong(arguments[ACTIVATION]);
  spec.eps = PyFloat_AsDouble(arguments[EPS]);
  spec.weight_offset = PyFloat_AsDouble(arguments[OFFSET]);
  spec.is_joined = arguments[IS_JOINED] == Py_True;
  spec.returns_norm = arguments[RETURN_NORM] == Py_True;
  spec.recompute = arguments[RECOMPUTE] == Py_True;
  return spec;
}

// Computes a call and gives its results their node, in the order in which users get them; none where
// that is left to Python.
Tensors call(Spec spec, const Tensors& t, bool wants_sum) {
  const Tensor& x = t[X];
  if (!(x.is_cpu() || x.is_cuda()) || !are_ordinary(t, x) || is_watched() ||
      at::autocast::is_autocast_enabled(x.device().type())) {
    return {};
  }
  const bool keeps = at::GradMode::is_enabled() &&
      std::any_of(t.begin(), t.end(), [](const Tensor& v) { return v.defined() && v.requires_grad(); });
  // What is saved has to be an input or a result: second derivatives reach x through it.
  spec.returns_sum = t[RESIDUAL].defined() && (keeps || wants_sum);
  const auto conditions = conditions_of(x);
  const auto count = (t.size() - NAMED) / 2;
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (record.isActive() && count) {
    record.before(t[OUT_WEIGHT].defined() ? "fused_norm::norm_mlp" : "fused_norm::norm_linear");
  }
  Tensors results;
  {
    const WithoutLock without_lock;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto tensors = handles_of(t);
    Handles made(2 * count + EXTRAS);
    const auto status = chain::forward(
        &spec, conditions, static_cast<int64_t>(count), tensors.data(), keeps, made.data());
    if (!is_done(status)) return {};
    std::transform(made.begin(), made.end(), std::back_inserter(results), taken);
  }
  Tensors returned;
  const auto give = [&](const Tensor& y) {
    if (y.defined()) returned.push_back(y);
  };
  std::for_each(results.begin(), results.begin() + count, give);
  const size_t outputs = returned.size();
  if (spec.returns_sum) give(results[count + SUM]);
  give(results[count + NORM]);
  if (keeps) {
    auto* node = new NormLinearBackward(spec, t, conditions);
    const auto owner = own<NodePointer>(node);
    for (const auto& y : returned) torch::autograd::set_history(y, owner);
    node->save(t, results);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
    torch::autograd::fire_node_creation_hooks(owner);
#endif
  }
  // The sum is a result if it was asked for, and x where nothing was added.
  if (spec.returns_sum && !wants_sum) returned.erase(returned.begin() + outputs);
  if (!spec.returns_sum && wants_sum) returned.insert(returned.begin() + outputs, x);
  return returned;
}

// Runs a call of the family: one tensor, or a tuple of them. None where that is left to Python.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t argument_count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(argument_count == ARGUMENTS, "forward takes ", int{ARGUMENTS}, " arguments");
  const auto t = tensors_of(arguments);
  const auto spec = t.empty() ? std::nullopt : spec_of(arguments);
  if (!spec) Py_RETURN_NONE;
  const auto returned = call(*spec, t, arguments[RETURN_SUM] == Py_True);
  if (returned.empty()) Py_RETURN_NONE;
  if (returned.size() == 1) return THPVariable_Wrap(returned[0]);
  auto tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(returned.size())));
  for (size_t i = 0; i < returned.size(); ++i) {
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(returned[i]));
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

// trainable_eps(x, o): the norm of a trained eps. None where that is left to Python.
PyObject* trainable_eps(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "trainable_eps takes 2 arguments");
  if (!THPVariable_CheckExact(arguments[0]) || !THPVariable_CheckExact(arguments[1])) {
    Py_RETURN_NONE;
  }
  Tensors t(NAMED);
  t[X] = THPVariable_Unpack(arguments[0]);
  t[GAMMA] = THPVariable_Unpack(arguments[1]);
  Spec spec;
  spec.normalization = TRAINABLE_EPS;
  spec.returns_norm = true;
  const auto returned = call(spec, t, false);
  if (returned.empty()) Py_RETURN_NONE;
  return THPVariable_Wrap(returned[0]);
  END_HANDLE_TH_ERRORS
}

// set_chain(path, backward, is_alone): what this module calls.
PyObject* set_chain(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "set_chain takes 3 arguments");
  void* library = dlopen(PyUnicode_AsUTF8AndSize(arguments[0], nullptr), RTLD_NOW | RTLD_NOLOAD);
  TORCH_CHECK(library, "fused_norm: the chain is not loaded");
  chain::forward = reinterpret_cast<ChainForward>(dlsym(library, "chain_forward"));
  chain::backward = reinterpret_cast<ChainBackward>(dlsym(library, "chain_backward"));
  chain::error = reinterpret_cast<ChainError>(dlsym(library, "chain_error"));
  for (int i : {1, 2}) Py_IncRef(arguments[i]);
  Py_DecRef(std::exchange(python_backward, arguments[1]));
  Py_DecRef(std::exchange(python_is_alone, arguments[2]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace fused_norm

namespace {

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"forward", fast(fused_norm::forward), METH_FASTCALL,
     "forward(*tensors by name, weight, bias, normalization, activation, eps, weight_offset, "
     "joined, return_sum, return_norm, recompute)"},
    {"trainable_eps", fast(fused_norm::trainable_eps), METH_FASTCALL, "trainable_eps(x, o)"},
    {"set_chain", fast(fused_norm::set_chain), METH_FASTCALL,
     "set_chain(path, backward, is_alone)"},
    {nullptr, nullptr, 0, nullptr}};
#define AS_TEXT_(major, minor) #major "." #minor
#define AS_TEXT(major, minor) AS_TEXT_(major, minor)

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "fused_norm_node", "Calls of the op family with a node of C++.", -1,
    methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fused_norm_node() {
  PyObject* created = PyModule_Create2(&module, PYTHON_ABI_VERSION);
  if (created) {
    PyModule_AddStringConstant(created, "TORCH", AS_TEXT(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR));
  }
  return created;
}
