// What Python passes to a call, as tensors and options.

#pragma once

#include <limits>
#include <optional>

#include "nodes.h"
#include "seam.h"

namespace fused_norm {

inline bool is_tensor_or_none(PyObject* object) {
  return object == Py_None || THPVariable_CheckExact(object);
}

inline Tensor tensor_of(PyObject* object) {
  return object == Py_None ? Tensor() : THPVariable_Unpack(object);
}

// The items of a list or tuple, or the one thing that is neither.
inline c10::SmallVector<PyObject*, 4> items_of(PyObject* object) {
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
inline std::optional<Operands> operands_of(PyObject* const* named, PyObject* weight, PyObject* bias) {
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

// As own_eps in call/memory.py.
inline double epsilon_of(at::ScalarType dtype) {
  return statistics_dtype(dtype) == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                : std::numeric_limits<float>::epsilon();
}

// Where the arguments of `forward` stand after the tensors by name.
enum Argument {
  WEIGHT = NAMED, BIAS, NORMALIZATION, ACTIVATION, EPS, OFFSET, IS_JOINED, RETURN_SUM, RETURN_NORM,
  RECOMPUTE, ARGUMENTS
};

// What is to be computed; nothing where an argument has another type.
inline std::optional<Seam> seam_of(PyObject* const* arguments, const Operands& t) {
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

// The tensors of a list, undefined for None; nothing where one is not ordinary.
inline std::optional<Tensors> tensors_of(PyObject* list) {
  Tensors tensors;
  for (PyObject* item : items_of(list)) {
    if (!is_tensor_or_none(item)) return std::nullopt;
    tensors.push_back(tensor_of(item));
  }
  return tensors;
}

}  // namespace fused_norm
