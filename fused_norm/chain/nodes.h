// What nodes of PyTorch's graph have in common.

#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <ATen/core/Tensor.h>

#include "python.h"

namespace fused_norm {

using at::Tensor;
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

inline bool none_defined(const variable_list& gradients) {
  return std::none_of(
      gradients.begin(), gradients.end(), [](const Tensor& g) { return g.defined(); });
}

// Whether a transform, a tracer or a mode would see PyTorch's own ops.
inline bool is_watched() {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return !(keys - c10::default_included_set).empty();
}

// Whether tensors are ordinary ones of one device: the chain looks at the rest.
inline bool are_ordinary(at::ArrayRef<Tensor> tensors, const Tensor& like) {
  const auto key = like.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& v) {
    const auto keys = v.defined()
        ? v.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
            c10::autocast_dispatch_keyset
        : c10::DispatchKeySet(key);
    return keys == c10::DispatchKeySet(key) &&
        (!v.defined() || (v.device() == like.device() && !torch::autograd::isFwGradDefined(v)));
  });
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
inline c10::SmallVector<Tensor, 16> unwrapped(const py::object& sequence, size_t count) {
  c10::SmallVector<Tensor, 16> tensors(count);
  for (size_t i = 0; i < count; ++i) {
    const auto item = py::checked(PySequence_GetItem(sequence.ptr(), static_cast<Py_ssize_t>(i)));
    if (!item.is_none()) tensors[i] = THPVariable_Unpack(item.ptr());
  }
  return tensors;
}

}  // namespace fused_norm
