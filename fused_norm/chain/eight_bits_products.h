// Products of 8-bit matrices by Hopper's kernels, which decline what they do not support.

#pragma once

#include <cmath>
#include <cstdlib>

#include "eight_bits_quantize.h"
#include "row_ops.h"

namespace fused_norm {

// One scale for each row.
inline Tensor spread(const Tensor& scale, int64_t rows) {
  require_kernels(scale.dtype() == FLOAT32 && (scale.numel() == rows || scale.numel() == 1));
  if (scale.numel() == rows) return readable(scale);
  const auto each = empty(Shape{rows, 1}, scale);
  copy(each, scale.viewed(Shape{rows, 1}, Shape{0, 0}));
  return each;
}

// The scales in the layout of the kernels: one for each row, or of blocks with this many rows.
inline Tensor scales_of(const Scaled& given, int64_t rows_of_block) {
  const auto& [q, scale, of_blocks] = given;
  if (!of_blocks) return spread(scale, q.size(0));
  const int64_t rows = (q.size(0) + rows_of_block - 1) / rows_of_block;
  require_kernels(
      scale.dtype() == FLOAT32 &&
      are_equal(scale.sizes(), Shape{rows, blocks_of(q.size(1))}));
  return readable(scale);
}

// A Linear layer: its weight [N, K], and its bias [N] or none.
struct Layer {
  Scaled weight;
  Tensor bias;

  int64_t outputs() const { return weight.q.size(0); }
};

// A layer in the layout that kernels need to multiply these rows.
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
  return {
      {readable(weight.q), scales_of(weight, SCALE_BLOCK), weight.of_blocks}, readable(bias)};
}

// Rows in the layout that kernels multiply.
inline Scaled rows_of(const Scaled& given) {
  const auto& [q, scale, of_blocks] = given;
  require_kernels(
      q.dim() == 2 && (q.dtype() == E4M3 || (q.dtype() == E5M2 && !of_blocks)) && q.size(0) &&
      is_multiple(q.size(1)) && is_beside(scale, q));
  return {readable(q), scales_of(given, 1), of_blocks};
}

inline Call product_call(const Scaled& rows, int64_t N, bool are_kept, const EightBits& kernels) {
  auto call = rows_call(rows.q.size(0), N, kernels.context);
  call.K = rows.q.size(1);
  call.z = address(rows.q);
  call.z_scale = address(rows.scale);
  call.eight_bits = number_of(rows.q.dtype());
  call.block_scales = rows.of_blocks ? VECTORS : 0;
  // Only then were weights ready before the rows.
  call.strategy = are_kept ? FUSED : DECLINED;
  return call;
}

// Writes rows times the weight of a layer, both with scales of blocks, plus its bias and what is added,
// if anything is, to y, whose rows may be strided.
inline void block_product(
    const Scaled& rows, const Layer& layer, void* y, int64_t pitch, const Tensor& like,
    const EightBits& kernels, const Tensor& added = {}) {
  require_kernels(rows.of_blocks && layer.weight.of_blocks);
  auto call = product_call(rows, layer.outputs(), false, kernels);
  call.weight = address(layer.weight.q);
  call.weight_scale = address(layer.weight.scale);
  call.bias = address(layer.bias);
  call.residual = address(added);
  call.y = y;
  call.pitch = pitch;
  launch(kernels.linear, call, like);
}

// `product` below for operands with scales of blocks; an activation is a separate pass.
inline Tensor block_product(
    const Scaled& rows, const Layer& layer, const Layer& up, Sizes sizes, int64_t activation,
    const EightBits& kernels, Tensor* h, const Tensor& added) {
  const bool is_gate = activation >= GATED, is_pair = up.weight.defined();
  require_kernels(
      !is_pair || (is_gate && up.outputs() == layer.outputs() &&
                   up.bias.defined() == layer.bias.defined()));
  const int64_t own = layer.outputs(), N = is_pair ? 2 * own : own;
  require_kernels(!is_gate || (N / 2) % MULTIPLE == 0);
  const Tensor all =
      activation ? empty(Shape{rows.q.size(0), N}, rows.q, BFLOAT16)
                 : empty(Shape(sizes, N), rows.q, BFLOAT16);
  block_product(rows, layer, address(all), N, all, kernels, added);
  if (is_pair) {
    block_product(rows, up, static_cast<char*>(address(all)) + 2 * own, N, all, kernels);
  }
  if (!activation) return all;
  if (h) *h = all;
  const int64_t outputs = is_gate ? N / 2 : N;
  const auto y = empty(Shape(sizes, outputs), rows.q, BFLOAT16);
  const auto& passes = kernels_for(all, false).passes;
  auto call = rows_call(rows.q.size(0), outputs, passes.context);
  call.activation = activation;
  call.h = address(all);
  call.a = address(y);
  launch(passes.activate, call, all);
  return y;
}

// A layer before an activation, or the two of a gate, and the number of outputs of each.
struct Activated {
  Layer layer, up;
  int64_t N;
};

// Gives a call its layers: one, or for a gate two, which may be the halves of one.
inline Activated add_layers(
    Call& call, const Scaled& rows, const Layer& given, const Layer& given_up, int64_t activation) {
  Activated found{layer_of(given, rows.q), {}, 0};
  const auto& layer = found.layer;
  require_kernels(rows.of_blocks == layer.weight.of_blocks);
  const bool is_gate = activation >= GATED, is_pair = given_up.weight.defined();
  const int64_t N = found.N = call.N = layer.outputs() / (is_gate && !is_pair ? 2 : 1);
  call.activation = activation;
  call.weight = address(layer.weight.q);
  call.weight_scale = address(layer.weight.scale);
  call.bias = address(layer.bias);
  if (is_pair) {
    const auto& up = found.up = layer_of(given_up, rows.q);
    require_kernels(
        is_gate && up.outputs() == N && up.bias.defined() == layer.bias.defined() &&
        up.weight.of_blocks == rows.of_blocks);
    call.up = address(up.weight.q);
    call.up_scale = address(up.weight.scale);
    call.up_bias = address(up.bias);
  } else if (is_gate) {
    // The second half has its own scales only if it starts with a block.
    require_kernels(!rows.of_blocks || N % SCALE_BLOCK == 0);
    const int64_t scales = rows.of_blocks ? N / SCALE_BLOCK * blocks_of(call.K) : N;
    call.up = static_cast<char*>(call.weight) + N * call.K;
    call.up_scale = static_cast<float*>(call.weight_scale) + scales;
    if (call.bias) call.up_bias = static_cast<char*>(call.bias) + 2 * N;
  }
  return found;
}

// Whether a scale and its reciprocal have all their bits in 16 bits, where kernels multiply by them.
inline bool is_power_of_two(double scale) {
  int exponent = 0;
  return std::frexp(scale, &exponent) == 0.5 && std::abs(exponent) < 126;
}

// The activation of rows times the weight of a layer, plus its bias, or a gate, in 8 bits: the input rows
// of the next layer. They have scales of blocks; or all share the given scale.
inline Scaled hidden(
    const Scaled& given, const Layer& layer, const Layer& up, int64_t activation,
    bool power_of_two, double one_scale, bool is_kept, const EightBits& kernels) {
  const auto rows = rows_of(given);
  require_kernels(activation);
  require_kernels(rows.of_blocks || (is_power_of_two(one_scale) && rows.q.dtype() == E4M3));
  auto call = product_call(rows, 0, is_kept && !rows.of_blocks, kernels);
  const auto layers = add_layers(call, rows, layer, up, activation);
  const int64_t scales = rows.of_blocks ? blocks_of(call.N) : 1;
  const Scaled z{
      empty(Shape{call.M, call.N}, rows.q, E4M3), empty(Shape{call.M, scales}, rows.q, FLOAT32),
      rows.of_blocks};
  call.power_of_two = power_of_two;
  call.y_one_scale = one_scale;
  call.y = address(z.q);
  call.y_scale = address(z.scale);
  launch(kernels.linear, call, rows.q);
  return z;
}

// What is added to a product of these rows, in the layout that kernels read, if anything is. Nothing has
// both that and an activation.
inline Tensor addend_of(
    const Tensor& given, const Scaled& rows, int64_t outputs, int64_t activation) {
  require_kernels(
      !given.defined() ||
      (!activation && is_beside(given, rows.q) && given.dtype() == BFLOAT16 &&
       are_equal(given.sizes(), Shape{rows.q.size(0), outputs})));
  return readable(given);
}

// Zeros, and then the maxima of an activation, which its product keeps for the pass that quantizes it.
struct KeptMaxima {
  const Cast& cast;
  Tensor maxima;
};

// Rows times the weight of a layer, plus its bias, in bfloat16 and the sizes of rows except the last.
// The activation may be a gate, with a second layer or the second half as the gating input. If h is
// given, the activation's input, one or two times as wide, is written to it; if `kept` is, the
// activation's maxima. Without an activation, a matrix in bfloat16 may be added to the result, before it
// is rounded.
inline Tensor product(
    const Scaled& given, const Layer& given_layer, Sizes sizes, bool is_kept,
    const EightBits& kernels, int64_t activation = 0, const Layer& given_up = {},
    Tensor* h = nullptr, const Tensor& given_addend = {}, const KeptMaxima* kept = nullptr) {
  const auto rows = rows_of(given);
  require_kernels(!kept || (activation && !rows.of_blocks));
  if (rows.of_blocks) {
    const auto layer = layer_of(given_layer, rows.q);
    const Layer other = given_up.weight.defined() ? layer_of(given_up, rows.q) : Layer{};
    const auto added = addend_of(given_addend, rows, layer.outputs(), activation);
    return block_product(rows, layer, other, sizes, activation, kernels, h, added);
  }
  auto call = product_call(rows, 0, is_kept, kernels);
  const auto layers = add_layers(call, rows, given_layer, given_up, activation);
  const int64_t N = layers.N;
  const auto added = addend_of(given_addend, rows, N, activation);
  const auto y = empty(Shape(sizes, N), rows.q, BFLOAT16);
  call.y = address(y);
  call.residual = address(added);
  if (h) {
    *h = empty(Shape{call.M, activation >= GATED ? 2 * N : N}, rows.q, BFLOAT16);
    call.h = address(*h);
  }
  if (kept) {
    require_kernels(kept->maxima.numel() == Rooms::elements(call.M, N, kept->cast, true));
    call.workspace = address(kept->maxima);
    call.one_scale = !kept->cast.by_row();
  }
  launch(kernels.linear, call, y);
  return y;
}

// The gradients of weights with these outputs, of the columns of their gradients, one after another, and of the
// rows that they multiplied, all transposed, with scales of their rows. In one launch, as the tiles of one would
// keep few SMs busy. As long as there are rows, so they are added up in float32.
inline Tensors weight_gradients(
    const Scaled& columns, const std::vector<int64_t>& outputs, const Scaled& transposed,
    const EightBits& kernels) {
  const auto rows = rows_of(columns);
  require_kernels(!rows.of_blocks && outputs.size() <= MOST_PARTS);
  auto call = product_call(rows, 0, false, kernels);
  const auto layers = add_layers(call, rows, {transposed, {}}, {}, 0);
  Tensors found;
  std::array<Part, MOST_PARTS> parts{};
  for (size_t i = 0; i < outputs.size(); ++i) {
    found.push_back(empty(Shape{outputs[i], layers.N}, rows.q, BFLOAT16));
    parts[i].N = outputs[i];
    parts[i].y = address(found[i]);
  }
  call.dweight = address(found[0]);
  call.parts = parts.data();
  call.part_count = static_cast<int64_t>(outputs.size());
  launch(kernels.linear, call, rows.q);
  return found;
}

// dh from the gradient of the layer after the activation, in 8 bits, and that layer's transposed weight.
// Rows and columns have maxima, whichever are read later.
inline BeforeActivation product_before_activation(
    const Scaled& given, const Layer& given_layer, const ActivationInput& of, const Cast& cast,
    bool is_kept, const EightBits& kernels, Rooms& rooms) {
  const auto rows = rows_of(given);
  const auto layer = layer_of(given_layer, rows.q);
  require_kernels(!rows.of_blocks && !layer.weight.of_blocks && !cast.by_block());
  auto call = product_call(rows, layer.outputs(), is_kept, kernels);
  call.weight = address(layer.weight.q);
  call.weight_scale = address(layer.weight.scale);
  const auto found = add_gradient(call, of, call.N, rows.q, cast, true, rooms);
  call.dh = address(found.dh);
  launch(kernels.linear, call, rows.q);
  return found;
}

// The products of the same rows with several layers, in one launch if possible.
inline Tensors products(
    const Scaled& given, const std::vector<Layer>& given_layers, Sizes sizes, bool are_kept,
    const EightBits& kernels) {
  Tensors outputs;
  const size_t count = given_layers.size();
  const auto has_bias = [&](const Layer& layer) {
    return layer.bias.defined() == given_layers[0].bias.defined();
  };
  const bool is_grouped = count > 1 && !given.of_blocks && count <= MOST_PARTS && given.q.dtype() == E4M3 &&
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
