// Python's objects in C++, by functions of its stable ABI alone: one build of a node serves every
// version of Python. Classes have pybind11's names. Its own code, and macros such as
// PyTuple_GET_ITEM, read objects as one version of Python lays them out.

#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <torch/csrc/Exceptions.h>

namespace fused_norm::python {

// Owns a reference.
class object {
 public:
  object() = default;
  explicit object(PyObject* stolen) : pointer_(stolen) {}
  object(object&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  object& operator=(object&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~object() { Py_DecRef(pointer_); }

  PyObject* ptr() const { return pointer_; }
  PyObject* release() { return std::exchange(pointer_, nullptr); }
  explicit operator bool() const { return pointer_ != nullptr; }
  bool is_none() const { return pointer_ == Py_None; }

 private:
  PyObject* pointer_ = nullptr;
};

// Raises in C++ what Python has raised.
[[noreturn]] inline void throw_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

inline object checked(PyObject* pointer) {
  if (!pointer) throw_error();
  return object(pointer);
}

inline object cast(bool value) { return checked(PyBool_FromLong(value)); }
inline object cast(int value) { return checked(PyLong_FromLong(value)); }
inline object cast(int64_t value) { return checked(PyLong_FromLongLong(value)); }
inline object cast(double value) { return checked(PyFloat_FromDouble(value)); }
inline object cast(const std::string& value) {
  return checked(PyUnicode_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size())));
}

class list : public object {
 public:
  list() : object(checked(PyList_New(0))) {}
  void append(const object& item) {
    if (PyList_Append(ptr(), item.ptr()) != 0) throw_error();
  }
};

class tuple : public object {
 public:
  explicit tuple(size_t size) : object(checked(PyTuple_New(static_cast<Py_ssize_t>(size)))) {}
  void set(size_t place, object item) {
    if (PyTuple_SetItem(ptr(), static_cast<Py_ssize_t>(place), item.release()) != 0) throw_error();
  }
};

template <class... Values>
tuple make_tuple(const Values&... values) {
  tuple result(sizeof...(values));
  size_t place = 0;
  (result.set(place++, cast(values)), ...);
  return result;
}

// Takes Python's lock.
struct gil_scoped_acquire {
  PyGILState_STATE state = PyGILState_Ensure();
  gil_scoped_acquire() = default;
  gil_scoped_acquire(const gil_scoped_acquire&) = delete;
  ~gil_scoped_acquire() { PyGILState_Release(state); }
};

// Releases it.
struct gil_scoped_release {
  PyThreadState* state = PyEval_SaveThread();
  gil_scoped_release() = default;
  gil_scoped_release(const gil_scoped_release&) = delete;
  ~gil_scoped_release() { PyEval_RestoreThread(state); }
};

}  // namespace fused_norm::python
