// Folded weights of frozen parameters, which Python keeps.

#pragma once

#include <atomic>

#include "nodes.h"

namespace fused_norm {

// fold(normalization, weight_offset, activation, gamma, beta, weight, bias, *up) returns the folded
// weight and the sums beside it, or None for parameters that are not frozen.
inline PyObject* python_fold = nullptr;

// Whether any parameters are frozen (1), and whether values of some have left their device (2).
inline std::atomic<int> frozen_level{0};

// A weight with gamma folded in, and its row sums and constants.
struct Fold {
  Tensor weight, sums;

  void give(Call& call) const {
    call.fold_weight = weight.data_ptr();
    call.fold_sums = sums.data_ptr();
    call.fold_constants = static_cast<float*>(sums.data_ptr()) + sums.size(1);
  }
};

// Whether a call may have one.
inline bool may_have_fold(const Operands& t, bool keeps) {
  return frozen_level && !keeps && t[X].scalar_type() == at::kBFloat16;
}

// The fold for a call; nothing where not all of its parameters are frozen.
inline std::optional<Fold> frozen_fold(const Seam& kind, const Operands& t, const Call& call) {
  py::gil_scoped_acquire lock;
  const auto count = std::min<size_t>(t.count(), MOST_PARTS);
  py::tuple arguments(5 + 2 * count);
  arguments.set(0, py::cast(kind.normalization));
  arguments.set(1, py::cast(kind.weight_offset));
  arguments.set(2, py::cast(static_cast<int>(call.activation)));
  arguments.set(3, wrap(t[GAMMA]));
  arguments.set(4, wrap(t[BETA]));
  for (size_t i = 0; i < count; ++i) {
    arguments.set(5 + 2 * i, wrap(t.weight(i)));
    arguments.set(6 + 2 * i, wrap(t.bias(i)));
  }
  const auto found = py::checked(PyObject_CallObject(python_fold, arguments.ptr()));
  if (found.is_none()) return std::nullopt;
  const auto tensors = unwrapped(found, 2);
  return Fold{tensors[0], tensors[1]};
}

}  // namespace fused_norm
