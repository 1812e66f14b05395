// A forward, computed under the conditions that it is called in; nothing where that is left to Python.

#pragma once

#include <deque>
#include <optional>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include "seam_forward.h"

namespace fused_norm {

// kernels(x, normalization, is_alone), of backends/compiled.py; is_alone(), of sm90_kernels.py; and
// PyTorch's own is_captured().
inline PyObject *python_kernels = nullptr, *python_is_alone = nullptr,
                *python_is_captured = nullptr;

// The kernels of each dtype, device, stream and norm, found by Python once.
class KernelsOf {
 public:
  // How often Python has told this module what to call: it may find others from then on.
  static inline int told = 0;

  static const Kernels& find(const Tensor& x, int normalization, bool is_alone) {
    const auto stream = current_stream(x.device());
    const Key key{x.scalar_type(), stream, normalization, is_alone, may_use_tf32(x), told};
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
    int told;
    bool operator==(const Key&) const = default;
  };
};

// Whether something watches a call.
inline bool is_watched(const Tensor& x) {
  return is_watched() || at::autocast::is_autocast_enabled(x.device().type());
}

// Where a call is made: beside a collective, or in a CUDA graph. On a CPU neither matters.
struct Conditions {
  bool is_alone = true, is_captured = false;

  explicit Conditions(const Tensor& x) {
    if (x.is_cpu()) return;
    is_captured = py::checked(PyObject_CallNoArgs(python_is_captured)).ptr() == Py_True;
    is_alone = py::checked(PyObject_CallNoArgs(python_is_alone)).ptr() == Py_True;
  }
};

// Whether a call is left to Python.
inline bool is_left(
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
inline std::optional<Computed> computed(
    const Seam& kind, const Operands& t, bool keeps, const char* recorded = nullptr) {
  const auto sizes = sizes_of(kind, t);
  const Tensor& x = t[X];
  if (!sizes || frozen_level > 1) return std::nullopt;
  // What watches ops has seen them; autocast has, when they were traced.
  if (recorded ? is_watched(x) : is_watched()) return std::nullopt;
  prepare_products(current_stream(x.device()));
  const Conditions conditions(x);
  const Kernels& kernels = KernelsOf::find(x, kind.normalization, conditions.is_alone);
  if (is_left(kind, t, *sizes, conditions.is_captured, kernels)) return std::nullopt;
  std::optional<at::RecordFunction> record;
  if (recorded) {
    record.emplace(at::RecordScope::USER_SCOPE);
    if (record->isActive()) record->before(recorded);
  }
  py::gil_scoped_release without_lock;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return Computed{forward(kind, t, *sizes, keeps, may_have_fold(t, keeps), kernels), kernels};
}

}  // namespace fused_norm
