// Matrices of 8 bits: how they are made of bfloat16, plain and transposed, and multiplied, by Hopper's
// kernels. What these do not take is declined, and left to PyTorch's ops.

#pragma once

#include "linear.h"

namespace fused_norm {

// Operands start, and each of their rows, at a multiple of so many bytes.
constexpr int64_t MULTIPLE = 16;

inline void require_kernels(bool holds) {
  if (!holds) throw Declined();
}

inline bool is_beside(const Tensor& v, const Tensor& other) {
  return v.device_type() == other.device_type() && (v.is_cpu() || v.device() == other.device());
}

// The same values where kernels read 16 bytes at a time.
inline Tensor readable(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_contiguous()) return dense(tensor);
  const bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data()) % MULTIPLE == 0;
  return is_aligned ? tensor : cloned(tensor);
}

inline bool is_multiple(int64_t size) {
  return size > 0 && size % MULTIPLE == 0;
}

// A size up to a multiple of that.
inline int64_t padded(int64_t size) {
  return (size + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
}

// The kernels on the current stream of a tensor's device.
inline const EightBits& eight_bits_of(const Tensor& x) {
  Question question{};
  question.dtype = BFLOAT16;
  question.is_cpu = x.is_cpu();
  question.is_eight_bits = true;
  if (!x.is_cpu()) {
    question.device = x.device();
    question.stream = reinterpret_cast<int64_t>(current_stream(question.device));
  }
  const auto& found = loaded(question).eight_bits;
  require_kernels(found.linear);
  return found;
}

// How a matrix is quantized: to which type, with a scale for each row or one, rounded up or not.
struct Cast {
  DType dtype;
  bool by_row, power_of_two;

  Cast(DType dtype, const std::string& scaling, bool power_of_two)
      : dtype(dtype), by_row(scaling == "row"), power_of_two(power_of_two) {
    require_kernels(by_row || scaling == "tensor");
  }
};

// The number of a type in a record, as op/rows/types.mojo has it.
inline int64_t number_of(DType dtype) {
  return dtype == E5M2 ? 5 : 4;
}

// A matrix of 8 bits, with a scale for each row [M, 1], which may all be one; or with one [1, 1].
struct Scaled {
  Tensor q, scale;

  bool defined() const { return q.defined(); }
};

struct Quantized {
  Scaled plain, transposed;
};

// Room for the maxima of a matrix's columns, and of its rows if it is wanted as it lies; or for the one.
inline Tensor room_for_maxima(
    const Tensor& v, int64_t K, const Cast& cast, bool plain, int64_t matrices = 1) {
  const int64_t count = cast.by_row ? K + (plain ? v.size(0) : 0) : 1;
  // Two elements have the bits of one maximum, and kernels read four of these together.
  return zeros(Shape{matrices, 2 * ((count + 3) / 4 * 4)}, v);
}

// The gradient dh [M, N] before an activation, of da [M, N] and h; or of a gate, whose h is [M, 2 N],
// [M, 2 N] of one layer, or [2, M, N] of two; and the maxima of these.
struct BeforeActivation {
  Tensor dh, maxima;
};

inline BeforeActivation before_activation(
    const Tensor& da, const Tensor& h, int64_t activation, const Cast& cast, bool plain,
    int64_t layers, const EightBits& kernels) {
  const int64_t M = da.size(0), N = da.size(1), halves = activation >= GATED ? 2 : 1;
  require_kernels(
      h.dtype() == BFLOAT16 && is_beside(h, da) && are_equal(h.sizes(), Shape{M, halves * N}) &&
      N % 8 == 0 && N <= LONGEST_ROW / 2 && (layers == 1 || layers == halves));
  const auto own = readable(h);
  BeforeActivation found;
  found.dh = layers == 2 ? empty(Shape{2, M, N}, da) : empty(h.sizes(), da);
  found.maxima = room_for_maxima(da, halves / layers * N, cast, plain, layers);
  auto call = rows_call(M, 0, kernels.context);
  call.K = N;
  call.activation = activation;
  call.part_count = layers;
  call.da = address(da);
  call.h = address(own);
  call.x = address(found.dh);
  call.one_scale = !cast.by_row;
  // Its rows are quantized later, by their maxima.
  if (plain) call.z = address(found.dh);
  call.workspace = address(found.maxima);
  launch(kernels.maxima, call, da);
  return found;
}

// A matrix [M, K] as it lies and transposed, [K, M] with zeros up to a multiple of 16, as far as these
// are wanted; by maxima that are there, or are found here.
inline Quantized quantized(
    const Tensor& given, const Cast& cast, bool plain, bool transposed, const EightBits& kernels,
    Tensor maxima = {}) {
  require_kernels(
      given.dim() == 2 && given.dtype() == BFLOAT16 && given.numel() && given.data());
  const auto v = readable(given);
  const int64_t M = v.size(0), K = v.size(1);
  const bool by_maxima = maxima.defined() || transposed || !cast.by_row;
  require_kernels(K <= LONGEST_ROW && (K % 8 == 0 || !by_maxima));
  Quantized found;
  auto call = rows_call(M, 0, kernels.context);
  call.K = K;
  call.x = address(v);
  call.eight_bits = number_of(cast.dtype);
  call.power_of_two = cast.power_of_two;
  call.one_scale = !cast.by_row;
  if (plain) {
    found.plain = {empty(Shape{M, K}, v, cast.dtype), empty(Shape{M, 1}, v, FLOAT32)};
    call.z = address(found.plain.q);
    call.z_scale = address(found.plain.scale);
  }
  if (!by_maxima) {
    launch(kernels.quantize, call, v);
    return found;
  }
  if (transposed) {
    call.pitch = padded(M);
    found.transposed = {empty(Shape{K, call.pitch}, v, cast.dtype), empty(Shape{K, 1}, v, FLOAT32)};
    call.zt = address(found.transposed.q);
    call.zt_scale = address(found.transposed.scale);
  }
  const bool are_there = maxima.defined();
  if (!are_there) maxima = room_for_maxima(v, K, cast, plain);
  call.workspace = address(maxima);
  if (!are_there) launch(kernels.maxima, call, v);
  launch(kernels.quantize_by_maxima, call, v);
  return found;
}

// As many scales as rows.
inline Tensor spread(const Tensor& scale, int64_t rows) {
  require_kernels(scale.dtype() == FLOAT32 && (scale.numel() == rows || scale.numel() == 1));
  if (scale.numel() == rows) return readable(scale);
  const auto each = empty(Shape{rows, 1}, scale);
  copy(each, scale.viewed(Shape{rows, 1}, Shape{0, 0}));
  return each;
}

// A Linear layer: its weight [N, K], and its bias [N] or none.
struct Layer {
  Scaled weight;
  Tensor bias;

  int64_t outputs() const { return weight.q.size(0); }
};

// A layer as kernels read it beside rows.
inline Layer layer_of(const Layer& given, const Tensor& rows) {
  const auto& [weight, bias] = given;
  require_kernels(
      weight.q.dim() == 2 && weight.q.dtype() == E4M3 && is_beside(weight.q, rows) &&
      weight.q.size(1) == rows.size(1) && is_multiple(weight.q.size(0)) &&
      is_beside(weight.scale, rows));
  require_kernels(
      !bias.defined() ||
      (bias.dtype() == BFLOAT16 && is_beside(bias, rows) &&
       are_equal(bias.sizes(), Shape{weight.q.size(0)})));
  return {{readable(weight.q), spread(weight.scale, weight.q.size(0))}, readable(bias)};
}

// Rows as kernels multiply them.
inline Scaled rows_of(const Scaled& given) {
  const auto& [q, scale] = given;
  require_kernels(
      q.dim() == 2 && (q.dtype() == E4M3 || q.dtype() == E5M2) && q.size(0) &&
      is_multiple(q.size(1)) && is_beside(scale, q));
  return {readable(q), spread(scale, q.size(0))};
}

inline Call product_call(const Scaled& rows, int64_t N, bool are_kept, const EightBits& kernels) {
  auto call = rows_call(rows.q.size(0), N, kernels.context);
  call.K = rows.q.size(1);
  call.z = address(rows.q);
  call.z_scale = address(rows.scale);
  call.eight_bits = number_of(rows.q.dtype());
  // Only then were weights there before the rows were.
  call.strategy = are_kept ? FUSED : DECLINED;
  return call;
}

// Rows times the weight of a layer, plus its bias, in bfloat16 and the sizes of rows but for the last.
// The activation may be a gate: on what a second layer gives, or on the second half. What it is of,
// rows of one or two times as many elements, is written to h if that is asked for.
inline Tensor product(
    const Scaled& given, const Layer& given_layer, Sizes sizes, bool is_kept,
    const EightBits& kernels, int64_t activation = 0, const Layer& given_up = {},
    Tensor* h = nullptr) {
  const auto rows = rows_of(given);
  const auto layer = layer_of(given_layer, rows.q);
  const bool is_gate = activation >= GATED, is_pair = given_up.weight.defined();
  const int64_t N = layer.outputs() / (is_gate && !is_pair ? 2 : 1);
  auto call = product_call(rows, N, is_kept, kernels);
  call.activation = activation;
  call.weight = address(layer.weight.q);
  call.weight_scale = address(layer.weight.scale);
  call.bias = address(layer.bias);
  Layer up;
  if (is_pair) {
    up = layer_of(given_up, rows.q);
    require_kernels(
        is_gate && up.outputs() == N && up.bias.defined() == layer.bias.defined());
    call.up = address(up.weight.q);
    call.up_scale = address(up.weight.scale);
    call.up_bias = address(up.bias);
  } else if (is_gate) {
    call.up = static_cast<char*>(call.weight) + N * call.K;
    call.up_scale = static_cast<float*>(call.weight_scale) + N;
    if (call.bias) call.up_bias = static_cast<char*>(call.bias) + 2 * N;
  }
  const auto y = empty(Shape(sizes, N), rows.q, BFLOAT16);
  call.y = address(y);
  if (h) {
    *h = empty(Shape{call.M, is_gate ? 2 * N : N}, rows.q, BFLOAT16);
    call.h = address(*h);
  }
  launch(kernels.linear, call, y);
  return y;
}

// The products of the same rows with several layers, in one launch where that can be.
inline Tensors products(
    const Scaled& given, const std::vector<Layer>& given_layers, Sizes sizes, bool are_kept,
    const EightBits& kernels) {
  Tensors outputs;
  const size_t count = given_layers.size();
  const auto has_bias = [&](const Layer& layer) {
    return layer.bias.defined() == given_layers[0].bias.defined();
  };
  const bool is_grouped = count > 1 && count <= MOST_PARTS && given.q.dtype() == E4M3 &&
      std::all_of(given_layers.begin(), given_layers.end(), has_bias);
  if (!is_grouped) {
    for (const auto& layer : given_layers) {
      outputs.push_back(product(given, layer, sizes, are_kept, kernels));
    }
    return outputs;
  }
  const auto rows = rows_of(given);
  std::array<Part, MOST_PARTS> parts{};
  std::vector<Layer> layers;
  int64_t N = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto& layer = layers.emplace_back(layer_of(given_layers[i], rows.q));
    const auto& y = outputs.emplace_back(empty(Shape(sizes, layer.outputs()), rows.q, BFLOAT16));
    parts[i] = {
        layer.outputs(), address(layer.weight.q), address(layer.bias), address(y), nullptr,
        address(layer.weight.scale)};
    N += layer.outputs();
  }
  auto call = product_call(rows, N, are_kept, kernels);
  call.parts = parts.data();
  call.part_count = static_cast<int64_t>(count);
  launch(kernels.linears, call, rows.q);
  return outputs;
}

}  // namespace fused_norm
