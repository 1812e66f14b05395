// What nodes of PyTorch's graph have in common.

#pragma once

#include <algorithm>
#include <bitset>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "python.h"
#include "seam.h"

namespace fused_norm {

namespace py = fused_norm::python;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// PyTorch's pointer to a node: a std::shared_ptr where nodes do not count references themselves.
using NodePointer = std::decay_t<decltype(std::declval<Tensor>().grad_fn())>;

template <class Pointer>
Pointer own(torch::autograd::Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(node, [](auto* last) { deleteNode(last); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

// Runs PyTorch's hooks on a new node, where it has such.
inline void tell_of([[maybe_unused]] const NodePointer& node) {
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  torch::autograd::fire_node_creation_hooks(node);
#endif
}

inline std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// prepare_products(device), of backends/compiled.py.
inline PyObject* python_prepare = nullptr;

// Has PyTorch's products ready in this thread on a GPU, once: a captured graph may choose them later,
// and they cannot begin within a capture.
inline void prepare_products(const std::optional<c10::Stream>& stream) {
  thread_local std::bitset<std::numeric_limits<c10::DeviceIndex>::max() + 1> ready;
  if (!stream || ready[stream->device_index()]) return;
  py::gil_scoped_acquire lock;
  const auto done =
      py::checked(PyObject_CallFunction(python_prepare, "i", int{stream->device_index()}));
  ready[stream->device_index()] = done.ptr() == Py_True;
}

inline bool none_defined(const variable_list& gradients) {
  return std::none_of(
      gradients.begin(), gradients.end(), [](const Tensor& g) { return g.defined(); });
}

// Whether a transform, a tracer or a mode would see PyTorch's own ops.
inline bool is_watched() {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return !(keys - c10::default_included_set).empty();
}

inline py::object wrap(const Tensor& tensor) {
  return py::checked(THPVariable_Wrap(tensor));
}

template <class List>
py::list wrap_all(const List& tensors) {
  py::list wrapped;
  for (const auto& tensor : tensors) wrapped.append(wrap(tensor));
  return wrapped;
}

// The tensors that Python returns, None for undefined ones.
inline Tensors unwrapped(const py::object& sequence, size_t count) {
  Tensors tensors(count);
  for (size_t i = 0; i < count; ++i) {
    const auto item = py::checked(PySequence_GetItem(sequence.ptr(), static_cast<Py_ssize_t>(i)));
    if (!item.is_none()) tensors[i] = THPVariable_Unpack(item.ptr());
  }
  return tensors;
}

}  // namespace fused_norm
