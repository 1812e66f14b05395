// Norms, quantization and Linear layers in 8 bits as PyTorch's ops. Layouts that the kernels do not take
// are left to Python, which uses PyTorch's ops or the 8-bit weights that it keeps for frozen ones.

#pragma once

#include "eight_bits_products.h"

namespace fused_norm {

// Runs kernels, or the op `..._by_python` if they decline.
template <class Result = Handles, class Body, class... Arguments>
Result by_kernels(Body body, const char* otherwise, const Arguments&... arguments) {
  try {
    const NoGrad no_grad;
    return body();
  } catch (const Declined&) {
  }
  return call_python<Result>(otherwise, arguments...);
}

inline void append(Handles& all, const Scaled& matrix) {
  all.push_back(given_of(matrix.q));
  all.push_back(given_of(matrix.scale));
}

inline Handles fp8_quantize(
    Given v, bool is_e5m2, std::string scaling, bool power_of_two, bool plain, bool transposed) {
  const auto run = [&] {
    const auto matrix = tensor_of(v);
    const Cast cast(is_e5m2 ? E5M2 : E4M3, scaling, power_of_two);
    require_kernels(matrix.dtype() == BFLOAT16);
    const OnDevice on_device(matrix);
    Rooms rooms;
    auto found = quantized({matrix, cast, plain, transposed}, eight_bits_of(matrix), rooms);
    for (auto* const scale : {&found.plain.scale, &found.transposed.scale}) {
      // All rows share one scale.
      const bool is_one = scale->defined() && cast.scaling == Scaling::TENSOR;
      if (is_one) *scale = scale->viewed(Shape{1, 1}, Shape{1, 1});
    }
    Handles all;
    if (plain) append(all, found.plain);
    if (transposed) append(all, found.transposed);
    return all;
  };
  return by_kernels(
      run, "fused_norm::fp8_quantize_by_python", v, is_e5m2, scaling, power_of_two, plain,
      transposed);
}

// The sum of x and a residual, undefined without one, and the normalized rows in 8 bits.
inline Handles normalized_in_8_bits(
    const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta,
    const Spec& spec, Scaling scaling, bool power_of_two) {
  const bool of_blocks = scaling == Scaling::VECTORS;
  require_kernels(scaling == Scaling::ROW || of_blocks);
  require_kernels(x.dtype() == BFLOAT16 && x.dim() && x.numel() && x.size(-1) <= LONGEST_ROW);
  // A row of 16 bits starts at a multiple of 16 bytes.
  require_kernels(x.size(-1) % 8 == 0);
  // Rows stay in registers; float32 parameters would take too many of them.
  require_kernels(
      !of_blocks || (x.size(-1) <= (residual.defined() ? 8192 : 16384) &&
                     (!gamma.defined() || gamma.dtype() == BFLOAT16) &&
                     (!beta.defined() || beta.dtype() == BFLOAT16)));
  const auto& kernels = eight_bits_of(x);
  const Shape features{x.size(-1)};
  const Tensor& affine = gamma.defined() ? gamma : beta;
  for (const auto& v : {gamma, beta}) {
    require_kernels(
        !v.defined() ||
        (is_beside(v, x) && are_equal(v.sizes(), features) && v.dtype() == affine.dtype() &&
         (v.dtype() == BFLOAT16 || v.dtype() == FLOAT32)));
  }
  require_kernels(
      !residual.defined() ||
      (is_beside(residual, x) && residual.dtype() == BFLOAT16 &&
       are_equal(residual.sizes(), x.sizes())));
  const auto rows = readable(x), added = readable(residual), scale_of = readable(gamma),
             shift_of = readable(beta);
  auto call = rows_call(x.numel() / x.size(-1), 0, kernels.context);
  call.K = x.size(-1);
  const auto total = empty(residual.defined() ? Shape(x.sizes()) : Shape{0}, x);
  const int64_t scales = of_blocks ? blocks_of(call.K) : 1;
  const Scaled z{empty(Shape{call.M, call.K}, x, E4M3), empty(Shape{call.M, scales}, x, FLOAT32)};
  call.block_scales = of_blocks ? VECTORS : 0;
  const auto statistics = empty(Shape{2, call.M}, x, FLOAT32);
  call.x = address(rows);
  call.residual = address(added);
  call.sum = residual.defined() ? address(total) : nullptr;
  call.gamma = address(scale_of);
  call.beta = address(shift_of);
  call.normalization = spec.normalization;
  call.eps = spec.eps;
  call.weight_offset = spec.weight_offset;
  call.norm_is_float32 = affine.defined() && affine.dtype() == FLOAT32;
  call.power_of_two = power_of_two;
  call.z = address(z.q);
  call.z_scale = address(z.scale);
  call.mean = address(statistics);
  call.rstd = static_cast<float*>(address(statistics)) + call.M;
  launch(kernels.normalize, call, x);
  Handles all{given_of(total)};
  append(all, z);
  return all;
}

inline Handles fp8_norm(
    Given x, Optional residual, Optional gamma, Optional beta, std::string normalization,
    double eps, double weight_offset, std::string scaling, bool power_of_two) {
  const auto run = [&] {
    const auto rows = tensor_of(x);
    const OnDevice on_device(rows);
    return normalized_in_8_bits(
        rows, tensor_of(residual), tensor_of(gamma), tensor_of(beta),
        {number_of(normalization), 0, eps, weight_offset}, scaling_of(scaling), power_of_two);
  };
  return by_kernels(
      run, "fused_norm::fp8_norm_by_python", x, residual, gamma, beta, normalization, eps,
      weight_offset, scaling, power_of_two);
}

// Declines frozen weights, whose 8-bit versions only Python has, before the first launch: its work would
// be wasted.
inline void require_weights(const Handles& weights, const Optionals& scales) {
  if (!frozen_level) return;
  for (size_t i = 0; i < weights.size(); ++i) require_kernels(scales.at(i).has_value());
}

// Appends the weights that have no scales to what is to be quantized, transposed as well if a backward
// needs that. Frozen weights are left to Python, which keeps their 8-bit versions.
inline void add_weights(
    std::vector<Unquantized>& all, const Handles& weights, const Optionals& scales,
    const Tensor& like, const Cast& cast, bool transposed) {
  for (size_t i = 0; i < weights.size(); ++i) {
    require_kernels(!(scales.at(i) && transposed));
    if (scales.at(i)) continue;
    const auto weight = tensor_of(weights[i]);
    require_kernels(!frozen_level && is_beside(weight, like));
    all.push_back({weight, cast, true, transposed});
  }
}

// Layers whose weights are in 8 bits as given, or the next ones that were made of them.
inline std::vector<Layer> layers_of(
    const Handles& weights, const Optionals& scales, const Optionals& biases, const Cast& cast,
    std::span<const Quantized> made) {
  std::vector<Layer> layers;
  size_t next = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto scale = tensor_of(scales.at(i));
    const Scaled weight = scale.defined()
        ? Scaled{tensor_of(weights[i]), scale, cast.by_block()}
        : made[next++].plain;
    layers.push_back({weight, tensor_of(biases.at(i))});
  }
  return layers;
}

// The same, quantized here.
inline std::vector<Layer> layers_of(
    const Handles& weights, const Optionals& scales, const Optionals& biases, const Tensor& like,
    const Cast& cast, const EightBits& kernels) {
  std::vector<Unquantized> all;
  add_weights(all, weights, scales, like, cast, false);
  Rooms rooms;
  expect(rooms, all);
  return layers_of(weights, scales, biases, cast, quantized(all, kernels, rooms));
}

inline bool is_bfloat16(torch::headeronly::ScalarType dtype) {
  return dtype == torch::headeronly::ScalarType::BFloat16;
}

// The factors of an 8-bit product: rows and a layer, or two layers for a gate.
struct Factors {
  Scaled rows;
  Layer layer, up;
};

inline Factors factors_of(
    const Tensor& q, Given scale, Given weight, Optional weight_scale, Optional bias, Optional up,
    Optional up_scale, Optional up_bias, const Cast& by, const Cast& cast,
    const EightBits& kernels) {
  const auto rows = rows_of({q, tensor_of(scale), by.by_block()});
  Handles weights{weight};
  if (up) weights.push_back(*up);
  const auto layers = layers_of(
      weights, {weight_scale, up_scale}, {bias, up_bias}, rows.q, cast, kernels);
  return {rows, layers[0], up ? layers[1] : Layer{}};
}

// From this many rows on, an H100 is faster if a product stores its activation in 8 bits (0.74 to 1.03 of
// the time with passes after it); one tile of rows takes up to 1.19, since its tiles have 128 columns.
constexpr int64_t FEWEST_HIDDEN_ROWS = 129;

// The activation of a product, or a gate of one or two, as rows in 8 bits.
inline Handles fp8_hidden(
    Given q, Given scale, Given weight, Optional weight_scale, std::string scaling,
    std::string weight_scaling, bool power_of_two, Optional bias, std::string activation,
    torch::headeronly::ScalarType dtype, Optional up, Optional up_scale, Optional up_bias,
    bool are_kept, Optional gamma, Optional beta, bool has_bound, double weight_offset,
    double one_scale) {
  const auto run = [&] {
    require_kernels(is_bfloat16(dtype));
    const Cast by(E4M3, scaling, power_of_two), cast(E4M3, weight_scaling, power_of_two);
    const auto given = tensor_of(q);
    const OnDevice on_device(given);
    const auto& kernels = eight_bits_of(given);
    const auto of = factors_of(
        given, scale, weight, weight_scale, bias, up, up_scale, up_bias, by, cast, kernels);
    const int64_t number = number_of(activation);
    // One scale is given only for enough rows (ops/hidden_scale.py).
    const bool stays =
        of.rows.of_blocks ? of.rows.q.size(0) >= FEWEST_HIDDEN_ROWS : one_scale != 0;
    Scaled z;
    if (stays) {
      z = hidden(
          of.rows, of.layer, of.up, number, power_of_two, one_scale, are_kept, kernels);
    } else {
      const auto y = product(
          of.rows, of.layer, of.rows.q.sizes(), are_kept, kernels, number, of.up);
      Rooms rooms;
      z = quantized({y, by, true, false}, kernels, rooms).plain;
    }
    // All rows share one scale.
    if (by.scaling == Scaling::TENSOR) z.scale = z.scale.viewed(Shape{1, 1}, Shape{1, 1});
    Handles all;
    append(all, z);
    return all;
  };
  return by_kernels(
      run, "fused_norm::fp8_hidden_by_python", q, scale, weight, weight_scale, scaling,
      weight_scaling, power_of_two, bias, activation, dtype, up, up_scale, up_bias, are_kept, gamma,
      beta, has_bound, weight_offset, one_scale);
}

inline Given fp8_linear(
    Given q, Given scale, Given weight, Optional weight_scale, std::string scaling,
    std::string weight_scaling, bool power_of_two, Optional bias, Optional residual,
    std::string activation, torch::headeronly::ScalarType dtype, Optional up, Optional up_scale,
    Optional up_bias, bool are_kept) {
  const auto run = [&] {
    require_kernels(is_bfloat16(dtype));
    const Cast by(E4M3, scaling, power_of_two), cast(E4M3, weight_scaling, power_of_two);
    const auto given = tensor_of(q);
    const OnDevice on_device(given);
    const auto& kernels = eight_bits_of(given);
    const auto of = factors_of(
        given, scale, weight, weight_scale, bias, up, up_scale, up_bias, by, cast, kernels);
    return given_of(product(
        of.rows, of.layer, of.rows.q.sizes(), are_kept, kernels, number_of(activation), of.up,
        nullptr, tensor_of(residual)));
  };
  return by_kernels<Given>(
      run, "fused_norm::fp8_linear_by_python", q, scale, weight, weight_scale, scaling,
      weight_scaling, power_of_two, bias, residual, activation, dtype, up, up_scale, up_bias,
      are_kept);
}

inline Handles fp8_linears(
    Given q, Given scale, Handles weights, Optionals weight_scales, std::string scaling,
    std::string weight_scaling, bool power_of_two, Optionals biases,
    torch::headeronly::ScalarType dtype, bool are_kept) {
  const auto run = [&] {
    require_kernels(is_bfloat16(dtype));
    const Cast by(E4M3, scaling, power_of_two), cast(E4M3, weight_scaling, power_of_two);
    const auto given = tensor_of(q);
    const OnDevice on_device(given);
    const auto rows = rows_of({given, tensor_of(scale), by.by_block()});
    const auto& kernels = eight_bits_of(rows.q);
    const auto layers = layers_of(weights, weight_scales, biases, rows.q, cast, kernels);
    Handles all;
    for (const auto& y : products(rows, layers, rows.q.sizes(), are_kept, kernels)) {
      all.push_back(given_of(y));
    }
    return all;
  };
  return by_kernels(
      run, "fused_norm::fp8_linears_by_python", q, scale, weights, weight_scales, scaling,
      weight_scaling, power_of_two, biases, dtype, are_kept);
}

}  // namespace fused_norm
