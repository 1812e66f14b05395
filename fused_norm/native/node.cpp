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

// Computes a call and gives its results their node; one tensor, or a tuple of them. None where that
// is left to Python.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == ARGUMENTS, "forward takes ", int{ARGUMENTS}, " arguments");
  const auto t = operands_of(arguments, arguments[WEIGHT], arguments[BIAS]);
  if (!t) Py_RETURN_NONE;
  auto kind = seam_of(arguments, *t);
  if (!kind) Py_RETURN_NONE;
  const auto sizes = sizes_of(*kind, *t);
  if (!sizes) Py_RETURN_NONE;
  const bool keeps = at::GradMode::is_enabled() &&
      std::any_of(t->flat.begin(), t->flat.end(), [](const Tensor& v) {
                       return v.defined() && v.requires_grad();
                     });
  const Tensor& x = (*t)[X];
  if (is_watched(x) || is_first_of_thread(current_stream(x.device()))) Py_RETURN_NONE;
  const Conditions conditions(x, keeps);
  const Kernels& kernels = KernelsOf::find(x, kind->normalization, conditions.is_alone);
  if (is_left(*kind, *t, *sizes, conditions.is_captured, kernels)) Py_RETURN_NONE;
  const auto folds = keeping(*t, keeps, conditions.is_alone, conditions.promise);
  const bool returns_sum = arguments[RETURN_SUM] == Py_True;
  // What is saved has to be an input or a result: second derivatives reach x through it.
  if (keeps) kind->returns_sum = t->has_sum();
  Results results;
  {
    RECORD_USER_SCOPE(
        (*t)[OUT_WEIGHT].defined() ? "fused_norm::norm_mlp" : "fused_norm::norm_linear");
    py::gil_scoped_release without_lock;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    results = fused_norm::forward(*kind, *t, *sizes, keeps, folds, kernels);
  }
  if (keeps) set_node(*kind, *t, results, kernels);
  return wrapped(*kind, *t, results, returns_sum);
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
