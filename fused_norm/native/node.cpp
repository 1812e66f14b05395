// The op family without Python: its forward, and its backward as a node of PyTorch's graph.
//
// Both passes ask the kernels' plan, allocate their results and call C functions of the kernels'
// libraries, with PyTorch's products between them. Whatever is not plain (a second derivative, a
// compiler or a mode that watches, a tensor of another layout) goes back to Python.

#include <pthread.h>

#include <deque>
#include <limits>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/version.h>

#include "row_node.h"
#include "seam_node.h"

namespace {

using namespace fused_norm;
namespace py = fused_norm::python;

// kernels(x, normalization, is_alone), of backends/compiled.py; is_alone(), of sm90_kernels.py; the
// number of the promise() that holds, of folds.py; and PyTorch's own is_captured().
PyObject *python_kernels = nullptr, *python_is_alone = nullptr, *python_promise = nullptr,
         *python_is_captured = nullptr;

// The kernels of each dtype, device, stream and norm, found by Python once.
class KernelsOf {
 public:
  static const Kernels& find(const Tensor& x, int normalization, bool is_alone) {
    const auto stream = current_stream(x.device());
    const Key key{x.scalar_type(), stream, normalization, is_alone, may_use_tf32(x)};
    static std::deque<std::pair<Key, Kernels>> known;
    for (const auto& [of, kernels] : known) {
      if (of == key) return kernels;
    }
    const auto found = py::checked(PyObject_CallFunction(
        python_kernels, "Nii", THPVariable_Wrap(x), normalization, is_alone));
    const char *product, *passes;
    long long product_context, way, passes_context;
    if (!PyArg_ParseTuple(
            found.ptr(), "sLLsL", &product, &product_context, &way, &passes, &passes_context)) {
      py::throw_error();
    }
    const Kernels kernels{
        Product(Library(product), product_context, way), Passes(Library(passes), passes_context)};
    return known.emplace_back(key, kernels).second;
  }

 private:
  // Whether PyTorch may multiply float32 in tf32. It may be told otherwise before the next call.
  static bool may_use_tf32(const Tensor& x) {
    return x.is_cuda() && x.scalar_type() == at::kFloat &&
        at::globalContext().float32Precision(
            at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
  }

  struct Key {
    at::ScalarType dtype;
    std::optional<c10::Stream> stream;
    int normalization;
    bool is_alone, may_use_tf32;
    bool operator==(const Key&) const = default;
  };
};

bool is_tensor_or_none(PyObject* object) {
  return object == Py_None || THPVariable_CheckExact(object);
}

Tensor tensor_of(PyObject* object) {
  return object == Py_None ? Tensor() : THPVariable_Unpack(object);
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

// Nothing where an argument is not an ordinary tensor.
std::optional<Operands> operands_of(PyObject* const* named, PyObject* weight, PyObject* bias) {
  const auto weights = items_of(weight), biases = items_of(bias);
  const bool has_biases = bias != Py_None;
  if (weights.empty() || (has_biases && biases.size() != weights.size())) return std::nullopt;
  Operands t(weights.size());
  for (int place = 0; place < NAMED; ++place) {
    if (!is_tensor_or_none(named[place])) return std::nullopt;
    t.flat[place] = tensor_of(named[place]);
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!THPVariable_CheckExact(weights[i])) return std::nullopt;
    t.flat[NAMED + i] = tensor_of(weights[i]);
    if (!has_biases) continue;
    if (!is_tensor_or_none(biases[i])) return std::nullopt;
    t.flat[NAMED + weights.size() + i] = tensor_of(biases[i]);
  }
  return t;
}

double epsilon_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return std::numeric_limits<c10::BFloat16>::epsilon();
  if (dtype == at::kHalf) return std::numeric_limits<c10::Half>::epsilon();
  if (dtype == at::kFloat) return std::numeric_limits<float>::epsilon();
  return std::numeric_limits<double>::epsilon();
}

// Where the arguments of `forward` stand after the tensors by name.
enum Argument {
  WEIGHT = NAMED, BIAS, NORMALIZATION, ACTIVATION, EPS, OFFSET, IS_JOINED, RETURN_SUM, RETURN_NORM,
  RECOMPUTE, ARGUMENTS
};

// What is to be computed; nothing where an argument has another type.
std::optional<Seam> seam_of(PyObject* const* arguments, const Operands& t) {
  Seam kind;
  kind.normalization = static_cast<int>(PyLong_AsLong(arguments[NORMALIZATION]));
  kind.activation = static_cast<int>(PyLong_AsLong(arguments[ACTIVATION]));
  if (PyFloat_CheckExact(arguments[EPS])) {
    kind.eps = PyFloat_AsDouble(arguments[EPS]);
  } else if (arguments[EPS] == Py_None && !kind.has_mean() && t[X].defined()) {
    kind.eps = epsilon_of(t[X].scalar_type());
  } else {
    return std::nullopt;
  }
  if (!PyFloat_CheckExact(arguments[OFFSET])) return std::nullopt;
  kind.weight_offset = PyFloat_AsDouble(arguments[OFFSET]);
  kind.is_joined = arguments[IS_JOINED] == Py_True;
  kind.returns_sum = t.has_sum() && arguments[RETURN_SUM] == Py_True;
  kind.returns_norm = arguments[RETURN_NORM] == Py_True;
  kind.recompute = arguments[RECOMPUTE] == Py_True;
  return kind;
}

// Whether something watches a call.
bool is_watched(const Tensor& x) {
  return fused_norm::is_watched() || at::autocast::is_autocast_enabled(x.device().type());
}

// Where a call is made: beside a collective, in a CUDA graph, or, where folds may be kept, under a
// promise not to change parameters. On a CPU none of it matters.
struct Conditions {
  bool is_alone = true, is_captured = false;
  int64_t promise = 0;

  Conditions(const Tensor& x, bool keeps) {
    if (x.is_cpu()) return;
    is_captured = py::checked(PyObject_CallNoArgs(python_is_captured)).ptr() == Py_True;
    is_alone = py::checked(PyObject_CallNoArgs(python_is_alone)).ptr() == Py_True;
    if (!keeps) promise = PyLong_AsLongLong(py::checked(PyObject_CallNoArgs(python_promise)).ptr());
  }
};

PyObject* wrapped(const Seam& kind, const Operands& t, const Results& results, bool returns_sum) {
  Tensors all = results.outputs;
  if (returns_sum) all.push_back(kind.returns_sum ? results.sum : t[X]);
  if (kind.returns_norm) all.push_back(results.norm);
  if (all.size() == 1) return THPVariable_Wrap(all[0]);
  py::tuple tuple(all.size());
  for (size_t i = 0; i < all.size(); ++i) tuple.set(i, wrap(all[i]));
  return tuple.release();
}

// Whether a call is left to Python.
bool is_left(
    const Seam& kind, const Operands& t, const Sizes& sizes, bool is_captured,
    const Kernels& kernels) {
  // Hopper's plan has other thresholds in a graph, which may read folds that Python keeps for it.
  return !t[X].is_cpu() && has_product(kind, t, sizes, kernels) && is_captured;
}

struct Computed {
  Results results;
  const Kernels& kernels;
};

// Computes a call, that of an op if it is not to be recorded; nothing where that is left to Python.
std::optional<Computed> computed(
    const Seam& kind, const Operands& t, bool keeps, const char* recorded = nullptr) {
  const auto sizes = sizes_of(kind, t);
  const Tensor& x = t[X];
  if (!sizes) return std::nullopt;
  // What watches ops has seen them; autocast has, when they were traced.
  if (recorded ? is_watched(x) : fused_norm::is_watched()) return std::nullopt;
  if (is_first_of_thread(current_stream(x.device()))) return std::nullopt;
  const Conditions conditions(x, keeps);
  const Kernels& kernels = KernelsOf::find(x, kind.normalization, conditions.is_alone);
  if (is_left(kind, t, *sizes, conditions.is_captured, kernels)) return std::nullopt;
  const auto folds = keeping(t, keeps, conditions.is_alone, conditions.promise);
  std::optional<at::RecordFunction> record;
  if (recorded) {
    record.emplace(at::RecordScope::USER_SCOPE);
    if (record->isActive()) record->before(recorded);
  }
  py::gil_scoped_release without_lock;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return Computed{fused_norm::forward(kind, t, *sizes, keeps, folds, kernels), kernels};
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

// The kind of an op's call, which says itself whether the sum is a result: of its backward the sum
// is x. Nothing where kernels cannot take it.
std::optional<Seam> op_of(PyObject* const* arguments, const std::optional<Operands>& t) {
  if (!t) return std::nullopt;
  auto kind = seam_of(arguments, *t);
  if (kind) kind->returns_sum = arguments[RETURN_SUM] == Py_True;
  return kind;
}

// op_forward(*those of forward, keeps): the list that the op seam_forward returns. None where that is
// left to Python.
PyObject* op_forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
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

// The tensors of a list, undefined for None; nothing where one is not ordinary.
std::optional<Tensors> tensors_of(PyObject* list) {
  Tensors tensors;
  for (PyObject* item : items_of(list)) {
    if (!is_tensor_or_none(item)) return std::nullopt;
    tensors.push_back(tensor_of(item));
  }
  return tensors;
}

// op_backward(*those of forward, products, grad_outputs, wanted): the list that the op seam_backward
// returns. None where that is left to Python.
PyObject* op_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == ARGUMENTS + 3, "op_backward takes ", ARGUMENTS + 3, " arguments");
  const auto t = operands_of(arguments, arguments[WEIGHT], arguments[BIAS]);
  const auto kind = op_of(arguments, t);
  const auto products = tensors_of(arguments[ARGUMENTS]);
  const auto grads = tensors_of(arguments[ARGUMENTS + 1]);
  if (!kind || !products || !grads) Py_RETURN_NONE;
  const Tensor& x = (*t)[X];
  if (!x.defined() || !has_kernel(x, t->norm_dtype()) || fused_norm::is_watched() ||
      is_first_of_thread(current_stream(x.device()))) {
    Py_RETURN_NONE;
  }
  Wanted wanted;
  for (PyObject* flag : items_of(arguments[ARGUMENTS + 2])) wanted.push_back(flag == Py_True);
  const Conditions conditions(x, true);
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
    if (!wanted[place] || !t->flat[place].defined()) continue;
    if (!(*found)[place].defined()) Py_RETURN_NONE;
    all.append(wrap((*found)[place]));
  }
  return all.release();
  END_HANDLE_TH_ERRORS
}

// The kernels for a Linear layer in a compiled graph; null where that is left to Python.
const Kernels* kernels_of_linear(const Tensor& x) {
  if (fused_norm::is_watched() || is_first_of_thread(current_stream(x.device()))) return nullptr;
  const Conditions conditions(x, true);
  return conditions.is_captured ? nullptr : &KernelsOf::find(x, 0, conditions.is_alone);
}

// op_linear_add(x, weight, bias, residual): what the op linear_add returns. None where that is left to
// Python.
PyObject* op_linear_add(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
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
PyObject* op_linear_add_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
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

// set_python(kernels, is_alone, promise, is_captured, fold, backward, row_kernels,
// row_backward): what this module calls.
PyObject* set_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject** const places[] = {
      &python_kernels, &python_is_alone, &python_promise, &python_is_captured, &python_fold,
      &python_backward, &python_row_kernels, &python_row_backward};
  TORCH_CHECK(count == std::ssize(places), "set_python takes ", std::size(places), " arguments");
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_IncRef(arguments[i]);
    Py_DecRef(std::exchange(*places[i], arguments[i]));
  }
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
     "set_python(kernels, is_alone, promise, is_captured, fold, backward, row_kernels, "
     "row_backward)"},
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
