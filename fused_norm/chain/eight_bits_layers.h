// Linear layers in 8 bits as PyTorch's op. Layouts that the kernels do not take are left to Python.

#pragma once

#include "eight_bits_ops.h"

namespace fused_norm {

// The columns of an activation of one layer, or of a gate of one or two.
inline int64_t activated_outputs(const Handles& weights, int64_t activation) {
  int64_t outputs = 0;
  for (const auto& weight : weights) {
    const auto matrix = tensor_of(weight);
    require_kernels(matrix.dim() == 2);
    outputs += matrix.size(0);
  }
  return activation >= GATED ? outputs / 2 : outputs;
}

// Several layers on the same rows, which are quantized here, or an activation of one layer or a gate of
// two. Rows with scales are in 8 bits already. One layer without an activation may add a residual. Then
// what a backward needs: the input of the activation, and the transposed rows and weights. Last, the
// maxima of the activation, if they are wanted: the next layer takes them as those of its rows.
inline Handles fp8_layers(
    Given z, Handles weights, Optionals weight_scales, Optionals biases, std::string scaling,
    std::string weight_scaling, bool power_of_two, torch::headeronly::ScalarType dtype,
    bool are_kept, std::string activation, bool keeps_h, bool keeps_rows, bool keeps_weights,
    Optional residual, Optional maxima, bool leaves_maxima, Optional z_scale) {
  const auto run = [&] {
    const auto given = tensor_of(z);
    require_kernels(is_bfloat16(dtype) && given.dim());
    require_kernels(given.dtype() == (z_scale ? E4M3 : BFLOAT16) && !(z_scale && keeps_rows));
    require_kernels(given.numel());
    const auto added = dense(tensor_of(residual));
    require_kernels(
        !added.defined() ||
        (weights.size() == 1 &&
         are_equal(added.sizes(), Shape(given.sizes(), tensor_of(weights[0]).size(0)))));
    require_weights(weights, weight_scales);
    const Cast cast(E4M3, scaling, power_of_two), by(E4M3, weight_scaling, power_of_two);
    const OnDevice on_device(given);
    const auto& kernels = eight_bits_of(given);
    const auto whole = dense(given).rows();
    const auto own = tensor_of(maxima);
    require_kernels(
        !own.defined() ||
        (!cast.by_block() && own.dtype() == BFLOAT16 && is_beside(own, whole) &&
         are_equal(own.sizes(), Shape{Rooms::elements(whole.size(0), whole.size(1), cast, true)})));
    require_kernels(!leaves_maxima || (!activation.empty() && !cast.by_block()));
    std::vector<Unquantized> matrices;
    if (!z_scale) matrices.push_back({whole, cast, true, keeps_rows, readable(own)});
    add_weights(matrices, weights, weight_scales, given, by, keeps_weights);
    Rooms rooms;
    KeptMaxima kept{cast, {}};
    if (leaves_maxima) {
      const int64_t M = whole.size(0), N = activated_outputs(weights, number_of(activation));
      rooms.expect(M, N, cast, true);
      expect(rooms, matrices);
      // First: a result of an op begins where its memory does.
      kept.maxima = rooms.take(whole, M, N, cast, true);
      const int64_t count = kept.maxima.numel();
      kept.maxima = kept.maxima.viewed(Shape{count}, Shape{1});
    } else {
      expect(rooms, matrices);
    }
    const auto made = quantized(matrices, kernels, rooms);
    const auto of_weights = std::span(made).subspan(z_scale ? 0 : 1);
    const auto rows =
        z_scale ? Quantized{{whole, tensor_of(*z_scale), cast.by_block()}, {}} : made[0];
    const auto layers = layers_of(weights, weight_scales, biases, by, of_weights);
    Handles all;
    if (activation.empty() && !added.defined()) {
      for (const auto& y : products(rows.plain, layers, given.sizes(), are_kept, kernels)) {
        all.push_back(given_of(y));
      }
    } else {
      Tensor h;
      const Layer other = layers.size() == 2 ? layers[1] : Layer{};
      all.push_back(given_of(product(
          rows.plain, layers[0], given.sizes(), are_kept, kernels, number_of(activation), other,
          keeps_h ? &h : nullptr, added.defined() ? added.rows() : added,
          leaves_maxima ? &kept : nullptr)));
      if (keeps_h) all.push_back(given_of(h));
    }
    if (keeps_rows) append(all, rows.transposed);
    if (keeps_weights) {
      for (const auto& weight : of_weights) append(all, weight.transposed);
    }
    if (leaves_maxima) all.push_back(given_of(kept.maxima));
    return all;
  };
  return by_kernels(
      run, "fused_norm::fp8_layers_by_python", z, weights, weight_scales, biases, scaling,
      weight_scaling, power_of_two, dtype, are_kept, activation, keeps_h, keeps_rows, keeps_weights,
      residual, maxima, leaves_maxima, z_scale);
}

}  // namespace fused_norm
