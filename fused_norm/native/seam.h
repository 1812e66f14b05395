// A call of the op family: what it computes, its tensors, and whether kernels can take them.

#pragma once

#include <algorithm>
#include <optional>

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "kernels.h"

namespace fused_norm {

using Tensors = c10::SmallVector<Tensor, 16>;

// As `Seam` in composition.py; a norm and an activation are their numbers in the record.
struct Seam {
  int normalization = 0, activation = 0;
  double eps = 0, weight_offset = 0;
  bool is_joined = false, returns_sum = false, returns_norm = false, recompute = false;

  // A LayerNorm's rows have a mean.
  bool has_mean() const {
    return normalization == 0;
  }
  bool is_gated() const {
    return activation >= GATED;
  }
};

// Where the tensors of a call stand, as in composition.py; weights and then biases follow.
enum Place {
  X, RESIDUAL, GAMMA, BETA, SCALE, SHIFT, MEAN, RSTD, OUT_WEIGHT, OUT_BIAS, OUT_RESIDUAL, NAMED
};

// As FORMS in composition.py, which says what each is.
enum class Form { ROWS, FEATURES, GROUPS, STATISTICS };

// An operand that comes with the norm: its form, and where the record has it and its gradient.
// That of a summand of x is that of x.
struct OfNorm {
  Place place;
  Form form;
  void* Call::*address;
  void* Call::*gradient;
};

constexpr OfNorm OF_NORM[] = {
    {RESIDUAL, Form::ROWS, &Call::residual, nullptr},
    {GAMMA, Form::FEATURES, &Call::gamma, &Call::dgamma},
    {BETA, Form::FEATURES, &Call::beta, &Call::dbeta},
    {SCALE, Form::GROUPS, &Call::scale, &Call::dscale},
    {SHIFT, Form::GROUPS, &Call::shift, &Call::dshift},
    {MEAN, Form::STATISTICS, &Call::mean, nullptr},
    {RSTD, Form::STATISTICS, &Call::rstd, nullptr}};

// Whether a place is that of something that is added to x.
constexpr bool is_summand(size_t place) {
  for (const auto& o : OF_NORM) {
    if (o.place == place) return o.form == Form::ROWS;
  }
  return false;
}

// The tensors of a call, undefined for None.
struct Operands {
  Tensors flat;

  explicit Operands(size_t count = 0) : flat(NAMED + 2 * count) {}

  size_t count() const {
    return (flat.size() - NAMED) / 2;
  }
  const Tensor& operator[](Place place) const {
    return flat[place];
  }
  const Tensor& weight(size_t i) const {
    return flat[NAMED + i];
  }
  const Tensor& bias(size_t i) const {
    return flat[NAMED + count() + i];
  }
  bool has(Form form) const {
    return std::any_of(std::begin(OF_NORM), std::end(OF_NORM), [&](const OfNorm& o) {
      return o.form == form && flat[o.place].defined();
    });
  }
  bool has_sum() const {
    return has(Form::ROWS);
  }
  // The norm's parameters share a dtype.
  at::ScalarType norm_dtype() const {
    for (const auto& o : OF_NORM) {
      if (o.form == Form::FEATURES && flat[o.place].defined()) return flat[o.place].scalar_type();
    }
    return flat[X].scalar_type();
  }
  // Whether nothing comes before the norm, or between it and the Linear layers.
  bool is_bare() const {
    return !has_sum() && !has(Form::GROUPS);
  }
  // Whether there are two weights of a size, of which one may gate the other.
  bool is_pair() const {
    return count() == 2 && weight(0).sizes() == weight(1).sizes() &&
        bias(0).defined() == bias(1).defined();
  }
};

// Rows, features, all outputs of the first product, and groups of rows with a modulation of their
// own.
struct Sizes {
  int64_t M, K, N, groups;
};

inline at::ScalarType statistics_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline bool is_narrow(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Whether kernels have rows of a dtype, with parameters of a norm in that or another.
inline bool has_kernel(const Tensor& x, at::ScalarType norm) {
  const auto dtype = x.scalar_type();
  return (is_narrow(dtype) || dtype == at::kFloat || (dtype == at::kDouble && x.is_cpu())) &&
      (norm == dtype || (is_narrow(dtype) && norm == at::kFloat));
}

// Recognizes ordinary tensors of a device, whose values are in dense memory.
class Plain {
 public:
  explicit Plain(const Tensor& x)
      : keys_(backend(x)), device_(x.device()), is_there_(is_ordinary(x)) {}

  bool operator()(const Tensor& v, at::IntArrayRef shape, at::ScalarType dtype) const {
    // Of another layout, a tensor may have no sizes.
    return is_kind(v) && v.scalar_type() == dtype && v.sizes() == shape && is_dense(v);
  }
  bool may_be(const Tensor& v, at::IntArrayRef shape, at::ScalarType dtype) const {
    return !v.defined() || (*this)(v, shape, dtype);
  }
  bool is(const Tensor& v) const {
    return is_kind(v) && is_dense(v);
  }
  // The same, wherever its values are.
  bool is_kind(const Tensor& v) const {
    return is_there_ && backend(v) == keys_ && v.device() == device_ &&
        !torch::autograd::isFwGradDefined(v);
  }

 private:
  static bool is_dense(const Tensor& v) {
    return v.is_contiguous() && v.data_ptr() != nullptr;
  }
  static c10::DispatchKeySet backend(const Tensor& v) {
    return v.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
        c10::autocast_dispatch_keyset;
  }
  static bool is_ordinary(const Tensor& x) {
    const auto key = x.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    return backend(x) == c10::DispatchKeySet(key);
  }

  c10::DispatchKeySet keys_;
  c10::Device device_;
  bool is_there_;
};

// How many groups of neighboring rows have a modulation of their own: 0 if it has another form.
inline int64_t groups_of(const Tensor& modulation, at::IntArrayRef x) {
  const auto shape = modulation.sizes();
  const int64_t missing = static_cast<int64_t>(x.size()) - static_cast<int64_t>(shape.size());
  if (missing < 0 || shape.empty() || shape.back() != x.back()) return 0;
  const auto size = [&](int64_t i) { return i < missing ? 1 : shape[i - missing]; };
  int64_t prefix = static_cast<int64_t>(x.size()) - 1, groups = 1;
  while (prefix > 0 && size(prefix - 1) == 1) --prefix;
  for (int64_t i = 0; i < prefix; ++i) {
    if (size(i) != x[i]) return 0;
    groups *= x[i];
  }
  return groups;
}

// The sizes of a call that kernels can take as it stands; nothing for others.
inline std::optional<Sizes> sizes_of(const Seam& kind, const Operands& t) {
  const Tensor& x = t[X];
  if (!x.defined()) return std::nullopt;
  const Plain is_plain(x);
  if (!is_plain.is_kind(x) || !x.dim() || !x.numel()) return std::nullopt;
  const auto dtype = x.scalar_type(), wide = statistics_dtype(dtype);
  const auto norm = t.norm_dtype();
  const auto shape = x.sizes(), rows = shape.slice(0, shape.size() - 1);
  Sizes sizes{0, shape.back(), 0, 0};
  const int64_t K = sizes.K;
  sizes.M = x.numel() / K;
  if (K > LONGEST_ROW || !is_plain.is(x) || !has_kernel(x, norm)) return std::nullopt;
  const auto fits = [&](const Tensor& v, Form form) {
    if (form == Form::ROWS) return is_plain(v, shape, dtype);
    if (form == Form::FEATURES) return is_plain(v, K, norm);
    if (form == Form::STATISTICS) return is_plain(v, rows, wide);
    if (!is_plain.is(v) || v.scalar_type() != dtype) return false;
    const auto groups = groups_of(v, shape);
    const bool is_alike = !sizes.groups || sizes.groups == groups;
    sizes.groups = groups;
    return is_alike && groups && groups <= MOST_GROUPS;
  };
  for (const auto& o : OF_NORM) {
    if (t[o.place].defined() && !fits(t[o.place], o.form)) return std::nullopt;
  }
  int64_t N = 0;
  for (size_t i = 0; i < t.count(); ++i) {
    const Tensor& weight = t.weight(i);
    if (!weight.defined() || !is_plain.is_kind(weight) || weight.dim() != 2) return std::nullopt;
    N = weight.size(0);
    if (!N || !is_plain(weight, {N, K}, dtype) || !is_plain.may_be(t.bias(i), N, dtype)) {
      return std::nullopt;
    }
    sizes.N += N;
  }
  if (kind.is_joined) N = sizes.N;
  if (kind.is_gated() && (N % 2 || t.count() > 2)) return std::nullopt;
  if (const Tensor& last = t[OUT_WEIGHT]; last.defined()) {
    if (!is_plain.is_kind(last) || last.dim() != 2 || !last.numel()) return std::nullopt;
    c10::DimVector out(rows.begin(), rows.end());
    out.push_back(last.size(0));
    if (!is_plain(last, {last.size(0), kind.is_gated() ? N / 2 : N}, dtype) ||
        !is_plain.may_be(t[OUT_BIAS], last.size(0), dtype) ||
        !is_plain.may_be(t[OUT_RESIDUAL], out, dtype)) {
      return std::nullopt;
    }
  }
  return sizes;
}

// A record of a norm and what comes with it, for a CPU or a launcher.
inline Call norm_call(const Seam& kind, const Operands& t, const Sizes& sizes, int64_t context) {
  Call call{};
  call.M = sizes.M;
  call.K = sizes.K;
  call.eps = kind.eps;
  call.context = context;
  call.threads = threads();
  call.x = address(t[X]);
  call.normalization = kind.normalization;
  call.weight_offset = kind.weight_offset;
  call.groups = sizes.groups;
  call.norm_is_float32 = t.norm_dtype() != t[X].scalar_type();
  for (const auto& o : OF_NORM) call.*o.address = address(t[o.place]);
  return call;
}

// The record of a pass over rows of N elements that no norm is part of.
inline Call rows_call(int64_t M, int64_t N, int64_t context) {
  Call call{};
  call.M = M;
  call.N = N;
  call.context = context;
  call.threads = threads();
  return call;
}

// A tensor like another, whose rows have another length.
inline Tensor empty_rows(const Tensor& x, int64_t last) {
  c10::DimVector shape(x.sizes().begin(), x.sizes().end());
  shape.back() = last;
  return empty(shape, x);
}

inline Tensor as_rows(const Tensor& v) {
  return v.dim() == 2 ? v : v.view({-1, v.size(-1)});
}

}  // namespace fused_norm
