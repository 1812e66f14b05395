// A call of the op family: what it computes, its tensors, and whether kernels can take them.

#pragma once

#include <optional>

#include "chain.h"
#include "kernels.h"

namespace fused_norm {

// `FORMS` in composition.py, which documents each.
enum class Form { ROWS, FEATURES, GROUPS, STATISTICS };

// An operand of the norm: its form, and the fields of the record with its address and its gradient's.
// The gradient of a summand of x is that of x.
struct NormOperand {
  Place place;
  Form form;
  void* Call::*address;
  void* Call::*gradient;
};

constexpr NormOperand NORM_OPERANDS[] = {
    {RESIDUAL, Form::ROWS, &Call::residual, nullptr},
    {GAMMA, Form::FEATURES, &Call::gamma, &Call::dgamma},
    {BETA, Form::FEATURES, &Call::beta, &Call::dbeta},
    {SCALE, Form::GROUPS, &Call::scale, &Call::dscale},
    {SHIFT, Form::GROUPS, &Call::shift, &Call::dshift},
    {MEAN, Form::STATISTICS, &Call::mean, nullptr},
    {RSTD, Form::STATISTICS, &Call::rstd, nullptr}};

// The tensors of a call, undefined for None.
struct Operands {
  Tensors flat;

  explicit Operands(size_t count) : flat(NAMED + 2 * count) {}

  size_t count() const { return (flat.size() - NAMED) / 2; }
  const Tensor& operator[](Place place) const { return flat[place]; }
  const Tensor& weight(size_t i) const { return flat[NAMED + i]; }
  const Tensor& bias(size_t i) const { return flat[NAMED + count() + i]; }
  bool has(Form form) const {
    return std::any_of(std::begin(NORM_OPERANDS), std::end(NORM_OPERANDS), [&](const NormOperand& o) {
      return o.form == form && flat[o.place].defined();
    });
  }
  bool has_sum() const { return has(Form::ROWS); }
  // The norm's parameters share a dtype.
  DType norm_dtype() const {
    for (const auto& o : NORM_OPERANDS) {
      if (o.form == Form::FEATURES && flat[o.place].defined()) return flat[o.place].dtype();
    }
    return flat[X].dtype();
  }
  // The dtype of the products: autocast makes it narrower than that of x.
  DType product_dtype() const { return weight(0).dtype(); }
  bool is_narrow() const { return product_dtype() != flat[X].dtype(); }
  bool are_weights_dense() const {
    return std::all_of(flat.begin() + NAMED, flat.begin() + NAMED + count(),
                       [](const Tensor& w) { return w.is_contiguous(); });
  }
  // Whether there are two weights of one size, so that one may gate the other.
  bool is_pair() const {
    return count() == 2 && are_equal(weight(0).sizes(), weight(1).sizes()) &&
        bias(0).defined() == bias(1).defined();
  }
};

// Rows, features, all outputs of the first product, and groups of rows that each have their own
// modulation, whose vectors begin as many elements from each other.
struct Extent {
  int64_t M, K, N, groups, pitch;
};

// How many groups of consecutive rows share a modulation: 0 if it has another form.
inline int64_t groups_of(const Tensor& modulation, const Tensor& x) {
  const int64_t missing = x.dim() - modulation.dim();
  if (missing < 0 || !modulation.dim() || modulation.size(-1) != x.size(-1)) return 0;
  const auto size = [&](int64_t i) { return i < missing ? 1 : modulation.size(i - missing); };
  int64_t prefix = x.dim() - 1, groups = 1;
  while (prefix > 0 && size(prefix - 1) == 1) --prefix;
  for (int64_t i = 0; i < prefix; ++i) {
    if (size(i) != x.size(i)) return 0;
    groups *= x.size(i);
  }
  return groups;
}

// Kernels on a GPU load as many bytes at once, from multiples of that.
constexpr int64_t ALIGNMENT = 16;

// Elements from the vector of one group of rows to the next; 0 for a layout that kernels do not take.
inline int64_t pitch_of(const Tensor& modulation) {
  if (!modulation.dim()) return 0;
  const auto sizes = modulation.sizes(), strides = modulation.strides();
  const int64_t last = modulation.dim() - 1, K = sizes[last];
  if (modulation.is_contiguous()) return K;
  if (strides[last] != 1 && K > 1) return 0;
  // Of the innermost dimension of several vectors, and what the next one out has to have.
  int64_t pitch = 0, next = -1;
  for (int64_t i = last; i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (next < 0) pitch = strides[i];
    else if (strides[i] != next) return 0;
    next = strides[i] * sizes[i];
  }
  const int64_t bytes = modulation.element_size();
  const bool is_aligned = pitch * bytes % ALIGNMENT == 0 &&
      reinterpret_cast<uintptr_t>(modulation.data()) % ALIGNMENT == 0;
  const bool fits = pitch <= LONGEST_ROW;
  return fits && (is_aligned || K * bytes % ALIGNMENT != 0) ? pitch : 0;
}

// Whether there are kernels for rows of a dtype, with a norm's parameters and products in the same
// dtype or another.
inline bool has_kernel(const Tensor& x, DType norm, DType product) {
  const auto dtype = x.dtype();
  const bool is_known = is_low_precision(dtype) || dtype == FLOAT32 ||
      (dtype == FLOAT64 && x.is_cpu());
  return is_known && (norm == dtype || (is_low_precision(dtype) && norm == FLOAT32)) &&
      (product == dtype || (dtype == FLOAT32 && is_low_precision(product)));
}

// Whether a weight is stored by columns, like a Conv1D's when used as a Linear layer's.
inline bool is_transposed(const Tensor& weight) {
  const auto strides = weight.strides();
  return !weight.is_contiguous() && strides[0] == 1 && strides[1] == weight.size(0);
}

// Whether products, PyTorch's included, take a weight without a copy.
inline bool is_matrix(const Tensor& weight) {
  return weight.is_contiguous() || is_transposed(weight);
}

// The extent of a call whose layouts kernels can take; nothing for others. Everything is dense
// except weights, which PyTorch's products also take transposed.
inline std::optional<Extent> extent_of(const Spec& spec, const Operands& t) {
  const Tensor& x = t[X];
  if (!x.defined() || !x.dim() || !x.numel() || !t.count() || !t.weight(0).defined()) {
    return std::nullopt;
  }
  const auto dtype = x.dtype(), norm = t.norm_dtype(), product = t.product_dtype();
  const auto shape = x.sizes(), rows = shape.first(shape.size() - 1);
  const auto is_here = [&](const Tensor& v, DType wanted) {
    return v.device_type() == x.device_type() && (x.is_cpu() || v.device() == x.device()) &&
        v.dtype() == wanted && v.data();
  };
  const auto fits = [&](const Tensor& v, Sizes sizes, DType wanted) {
    return is_here(v, wanted) && are_equal(v.sizes(), sizes) && v.is_contiguous();
  };
  const auto may_fit = [&](const Tensor& v, Sizes sizes, DType wanted) {
    return !v.defined() || fits(v, sizes, wanted);
  };
  Extent extent{0, shape.back(), 0, 0, 0};
  const int64_t K = extent.K;
  extent.M = x.numel() / K;
  if (K > LONGEST_ROW || !fits(x, shape, dtype) || !has_kernel(x, norm, product)) {
    return std::nullopt;
  }
  for (const auto& o : NORM_OPERANDS) {
    const Tensor& v = t[o.place];
    if (!v.defined()) continue;
    if (o.form == Form::ROWS && !fits(v, shape, dtype)) return std::nullopt;
    if (o.form == Form::FEATURES && !fits(v, Shape{K}, norm)) return std::nullopt;
    if (o.form == Form::STATISTICS && !fits(v, rows, statistics_dtype(dtype))) return std::nullopt;
    if (o.form != Form::GROUPS) continue;
    const auto groups = groups_of(v, x), pitch = pitch_of(v);
    const bool is_alike =
        !extent.groups || (extent.groups == groups && extent.pitch == pitch);
    extent.groups = groups;
    extent.pitch = pitch;
    if (!is_here(v, dtype) || !is_alike || !groups || groups > MOST_GROUPS || !pitch) {
      return std::nullopt;
    }
  }
  int64_t N = 0;
  for (size_t i = 0; i < t.count(); ++i) {
    const Tensor& weight = t.weight(i);
    if (!weight.defined() || weight.dim() != 2 || !is_here(weight, product) || !is_matrix(weight)) {
      return std::nullopt;
    }
    N = weight.size(0);
    if (!N || weight.size(1) != K || !may_fit(t.bias(i), Shape{N}, product)) return std::nullopt;
    extent.N += N;
  }
  if (spec.is_joined) N = extent.N;
  if (spec.is_gated() && (N % 2 || t.count() > 2)) return std::nullopt;
  if (const Tensor& last = t[OUT_WEIGHT]; last.defined()) {
    if (last.dim() != 2 || !last.numel() || !is_here(last, product) || !is_matrix(last) ||
        last.size(1) != (spec.is_gated() ? N / 2 : N) ||
        !may_fit(t[OUT_BIAS], Shape{last.size(0)}, product) ||
        !may_fit(t[OUT_RESIDUAL], Shape(shape, last.size(0)), product)) {
      return std::nullopt;
    }
  }
  return extent;
}

inline Kernels kernels_of(const Spec& spec, const Operands& t, Conditions conditions) {
  return Kernels::find(t[X], t.product_dtype(), spec.normalization, spec.invariant, conditions);
}

// A record of a norm and its operands.
inline Call norm_call(const Spec& spec, const Operands& t, const Extent& extent, int64_t context) {
  Call call{};
  call.M = extent.M;
  call.K = extent.K;
  call.eps = spec.eps;
  call.context = context;
  call.threads = threads();
  call.x = address(t[X]);
  call.normalization = spec.normalization;
  call.weight_offset = spec.weight_offset;
  call.groups = extent.groups;
  call.group_pitch = extent.pitch;
  call.invariant = spec.invariant;
  if (t.is_narrow()) {
    call.narrow = t.product_dtype() == BFLOAT16 ? 1 : 2;
  } else {
    call.norm_is_float32 = t.norm_dtype() != t[X].dtype();
  }
  for (const auto& o : NORM_OPERANDS) call.*o.address = address(t[o.place]);
  return call;
}

// The record of rows of N elements without a norm.
inline Call rows_call(int64_t M, int64_t N, int64_t context) {
  Call call{};
  call.M = M;
  call.N = N;
  call.context = context;
  call.threads = threads();
  return call;
}

}  // namespace fused_norm
