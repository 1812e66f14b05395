// A call and its backward as a node of PyTorch's graph, without Python: it keeps tensors and calls the
// chain. It saves the time that `torch.autograd.Function` takes, and is all that is bound to a
// version of PyTorch. What is not plain (a second derivative, a compiler or a mode that watches, a
// tensor of another kind) it leaves to Python.

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/version.h>

#include "chain.h"
#include "nodes.h"
#include "row_node.h"

namespace fused_norm {

using Tensors = c10::SmallVector<Tensor, 16>;
using Handles = c10::SmallVector<AtenTensorHandle, 24>;

// What is added to x, whose gradient is that of x; and what else comes with the norm and has one.
constexpr bool is_summand(size_t place) { return place == X || place == RESIDUAL; }
constexpr bool is_of_norm(size_t place) { return place >= GAMMA && place < MEAN; }

namespace chain {
ChainForward forward;
ChainBackward backward;
ChainError error;
}  // namespace chain

// gradients(kind, tensors, products, grad_outputs, wanted), and whether no collective runs beside.
PyObject *python_backward, *python_is_alone;

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
  if (!handle) return {};
  auto* tensor = reinterpret_cast<Tensor*>(handle);
  Tensor result = std::move(*tensor);
  delete tensor;
  return result;
}

// Whether the chain has done it; false where that is left to Python.
bool is_done(int status) {
  if (status == FAILED && std::strstr(chain::error(), "out of memory")) {
    C10_THROW_ERROR(OutOfMemoryError, chain::error());
  }
  TORCH_CHECK(status != FAILED, chain::error());
  return status == DONE;
}

// With Python's lock.
Conditions conditions_of(const Tensor& x) {
  if (x.is_cpu()) return {1, 0};
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return {py::checked(PyObject_CallNoArgs(python_is_alone)).ptr() == Py_True,
          precision == at::Float32Precision::TF32};
}

// Which gradients are there, by place: `reached` in composition.py.
std::vector<uint8_t> reached(const Kind& kind, size_t count, at::ArrayRef<Tensor> gradients) {
  const size_t outputs = gradients.size() - kind.returns_sum - kind.returns_norm;
  const bool total = kind.returns_sum && gradients[outputs].defined();
  const bool through = std::any_of(
      gradients.begin(), gradients.begin() + outputs, [](const Tensor& g) { return g.defined(); });
  const bool norm = through || (kind.returns_norm && gradients.back().defined());
  std::vector<uint8_t> places(NAMED + 2 * count, through);
  for (size_t place = X; place < OUT_WEIGHT; ++place) {
    places[place] = is_summand(place) ? total || norm : is_of_norm(place) && norm;
  }
  for (size_t i = 0; outputs == count && i < count; ++i) {
    places[NAMED + i] = places[NAMED + count + i] = gradients[i].defined();
  }
  return places;
}

class NormLinearBackward : public torch::autograd::Node {
 public:
  NormLinearBackward(const Kind& kind, const Tensors& t, Conditions conditions)
      : kind_(kind), conditions_(conditions), stream_(current_stream(t[X].device())),
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
    const size_t end = kind_.activation ? t.size() : NAMED + count();
    for (size_t place = NAMED; place < end; ++place) keep(place, t[place]);
    for (const auto& h : results.slice(count() + EXTRAS)) keep(t.size(), h);
  }

  std::string name() const override {
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
    args.collect(kind_.eps);
    args.collect(kind_.weight_offset);
    args.collect(kind_.normalization);
    args.collect(kind_.activation);
    for (const bool flag :
         {kind_.is_joined, kind_.returns_sum, kind_.returns_norm, kind_.recompute}) {
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
    if (none_defined(gradients)) return variable_list(num_outputs());
    const auto reaches = reached(kind_, count(), gradients);
    Tensors found(edges_.size());
    if (!reaches[GAMMA]) {
      // The sum's alone, which is that of its summands.
      found[X] = gradients[gradients.size() - 1 - kind_.returns_norm];
      return by_edge(found, gradients);
    }
    // All summands get the same gradient, and what is added at the end that of the output.
    std::vector<uint8_t> wanted(edges_.size());
    for (size_t place = 0; place < wanted.size(); ++place) {
      if (!is_wanted(place) || !reaches[place] || place == OUT_RESIDUAL) continue;
      wanted[is_summand(place) ? size_t{X} : place] = true;
    }
    const auto [t, products] = unpacked();
    if (!may_compute || !compute(t, products, gradients, wanted, found)) {
      found = call_python(t, products, gradients, wanted);
    }
    return by_edge(found, gradients);
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

  bool is_wanted(size_t place) const {
    return edges_[place] >= 0 && task_should_compute_output(edges_[place]);
  }

  variable_list by_edge(const Tensors& found, const variable_list& gradients) const {
    variable_list results(num_outputs());
    for (size_t place = 0; place < found.size(); ++place) {
      if (!is_wanted(place)) continue;
      results[edges_[place]] = place == OUT_RESIDUAL ? gradients[0]
          : is_summand(place)                        ? found[X]
                                                     : found[place];
    }
    return results;
  }

  // Has the chain compute gradients; false where Python has to.
  bool compute(
      const Tensors& t, const Tensors& products, const variable_list& gradients,
      const std::vector<uint8_t>& wanted, Tensors& found) const {
    const Tensor& x = t[X];
    if (at::GradMode::is_enabled() || is_watched() || current_stream(x.device()) != stream_ ||
        !are_ordinary(t, x) || !are_ordinary(gradients, x)) {
      return false;
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto tensors = handles_of(t), kept = handles_of(products), grads = handles_of(gradients);
    Handles made(t.size());
    const auto status = chain::backward(
        &kind_, conditions_, static_cast<int64_t>(count()), tensors.data(),
        static_cast<int64_t>(kept.size()), kept.data(), static_cast<int64_t>(grads.size()),
        grads.data(), wanted.data(), made.data());
    if (!is_done(status)) return false;
    for (size_t place = 0; place < made.size(); ++place) found[place] = taken(made[place]);
    return true;
  }

  Tensors call_python(
      const Tensors& t, const Tensors& products, const variable_list& gradients,
      const std::vector<uint8_t>& wanted) const {
    py::gil_scoped_acquire lock;
    py::list mask;
    for (const bool flag : wanted) mask.append(py::cast(flag));
    const auto kind = py::make_tuple(
        kind_.normalization, kind_.activation, kind_.eps, kind_.weight_offset, kind_.is_joined,
        kind_.returns_sum, kind_.returns_norm, kind_.recompute);
    const auto tensors = wrap_all(t), kept = wrap_all(products), grads = wrap_all(gradients);
    const auto found = py::checked(PyObject_CallFunctionObjArgs(
        python_backward, kind.ptr(), tensors.ptr(), kept.ptr(), grads.ptr(), mask.ptr(), nullptr));
    return unwrapped(found, t.size());
  }

  Kind kind_;
  Conditions conditions_;
  std::optional<c10::Stream> stream_;
  bool has_sum_;
  // The edge of each place, -1 for none; and the place of each tensor saved, past the last for a
  // product.
  c10::SmallVector<int, 16> edges_, places_;
  std::vector<SavedVariable> saved_;
  std::mutex mutex_;
};

// Where the arguments of `forward` stand after the tensors by name.
enum Argument {
  WEIGHT = NAMED, BIAS, NORMALIZATION, ACTIVATION, EPS, OFFSET, IS_JOINED, RETURN_SUM, RETURN_NORM,
  RECOMPUTE, ARGUMENTS
};

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
std::optional<Kind> kind_of(PyObject* const* arguments, const Tensors& t) {
  if (!PyFloat_CheckExact(arguments[EPS]) || !PyFloat_CheckExact(arguments[OFFSET])) {
    return std::nullopt;
  }
  Kind kind;
  kind.normalization = PyLong_AsLong(arguments[NORMALIZATION]);
  kind.activation = PyLong_AsLong(arguments[ACTIVATION]);
  kind.eps = PyFloat_AsDouble(arguments[EPS]);
  kind.weight_offset = PyFloat_AsDouble(arguments[OFFSET]);
  kind.is_joined = arguments[IS_JOINED] == Py_True;
  kind.returns_sum = t[RESIDUAL].defined() && arguments[RETURN_SUM] == Py_True;
  kind.returns_norm = arguments[RETURN_NORM] == Py_True;
  kind.recompute = arguments[RECOMPUTE] == Py_True;
  return kind;
}

// Computes a call and gives its results their node; one tensor, or a tuple of them. None where that
// is left to Python.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t argument_count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(argument_count == ARGUMENTS, "forward takes ", int{ARGUMENTS}, " arguments");
  const auto t = tensors_of(arguments);
  if (t.empty()) Py_RETURN_NONE;
  auto kind = kind_of(arguments, t);
  const Tensor& x = t[X];
  if (!kind || !(x.is_cpu() || x.is_cuda()) || !are_ordinary(t, x) || is_watched() ||
      at::autocast::is_autocast_enabled(x.device().type())) {
    Py_RETURN_NONE;
  }
  const bool keeps = at::GradMode::is_enabled() &&
      std::any_of(t.begin(), t.end(), [](const Tensor& v) { return v.defined() && v.requires_grad(); });
  const bool returns_sum = kind->returns_sum;
  // What is saved has to be an input or a result: second derivatives reach x through it.
  if (keeps) kind->returns_sum = t[RESIDUAL].defined();
  const auto conditions = conditions_of(x);
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (record.isActive()) {
    record.before(t[OUT_WEIGHT].defined() ? "fused_norm::norm_mlp" : "fused_norm::norm_linear");
  }
  const auto count = (t.size() - NAMED) / 2;
  Tensors results;
  {
    py::gil_scoped_release without_lock;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto tensors = handles_of(t);
    Handles made(2 * count + EXTRAS);
    const auto status = chain::forward(
        &*kind, conditions, static_cast<int64_t>(count), tensors.data(), keeps, made.data());
    if (is_done(status)) {
      for (const auto handle : made) results.push_back(taken(handle));
    }
  }
  if (results.empty()) Py_RETURN_NONE;
  Tensors returned;
  const auto give = [&](const Tensor& y) {
    if (y.defined()) returned.push_back(y);
  };
  std::for_each(results.begin(), results.begin() + count, give);
  const size_t outputs = returned.size();
  if (kind->returns_sum) give(results[count + SUM]);
  give(results[count + NORM]);
  if (keeps) {
    auto* node = new NormLinearBackward(*kind, t, conditions);
    const auto owner = own<NodePointer>(node);
    for (const auto& y : returned) torch::autograd::set_history(y, owner);
    node->save(t, results);
    tell_of(owner);
  }
  // The sum is a result if it was asked for, and x where nothing was added.
  if (kind->returns_sum && !returns_sum) returned.erase(returned.begin() + outputs);
  if (!kind->returns_sum && arguments[RETURN_SUM] == Py_True) {
    returned.insert(returned.begin() + outputs, x);
  }
  if (returned.size() == 1) return THPVariable_Wrap(returned[0]);
  py::tuple tuple(returned.size());
  for (size_t i = 0; i < returned.size(); ++i) tuple.set(i, wrap(returned[i]));
  return tuple.release();
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
    {"set_rows", fast(fused_norm::set_rows), METH_FASTCALL, "set_rows(row_kernels, row_backward)"},
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
  pthread_atfork(nullptr, nullptr, [] { fused_norm::forked = true; });
  PyObject* created = PyModule_Create2(&module, PYTHON_ABI_VERSION);
  if (created) {
    PyModule_AddStringConstant(created, "TORCH", AS_TEXT(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR));
  }
  return created;
}
