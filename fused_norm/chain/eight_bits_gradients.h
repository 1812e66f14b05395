// The gradients of Linear layers in 8 bits as PyTorch's op. Layouts that the kernels do not take are left
// to Python.

#pragma once

#include "eight_bits_ops.h"

namespace fused_norm {

// How gradients and what they are multiplied by are quantized.
struct GradientCasts {
  Cast grad, weight, input;
  bool has_fp8_wgrad, are_kept;
};

// What the gradients of layers are computed from, and how.
struct Differentiated {
  GradientCasts how;
  // Rows [M, K]; or transposed in 8 bits.
  Tensor z;
  Scaled transposed;
  Tensors weights, scales;
  // The gradient of each layer's result, undefined for one without, its maxima if they are known, and the
  // sizes of all but their last dimension.
  std::vector<Pieces> dys{};
  Tensors maxima{};
  Sizes sizes{};
};

inline Differentiated differentiated(
    const Given& z, const Optional& z_scale, const Handles& weights, const Optionals& scales,
    const GradientCasts& how) {
  const auto rows = dense(tensor_of(z));
  const Scaled transposed{z_scale ? rows : Tensor(), tensor_of(z_scale)};
  require_kernels(rows.dim() && rows.numel());
  require_kernels(
      transposed.defined() ? rows.dim() == 2 && how.has_fp8_wgrad : rows.dtype() == BFLOAT16);
  Differentiated of{how, rows.rows(), transposed, {}, {}};
  for (size_t i = 0; i < weights.size(); ++i) {
    of.weights.push_back(tensor_of(weights[i]));
    of.scales.push_back(tensor_of(scales.at(i)));
  }
  of.maxima.resize(weights.size());
  return of;
}

// Dense rows of a gradient in bfloat16.
inline Tensor gradient_rows(const Tensor& dy) {
  require_kernels(dy.dtype() == BFLOAT16 && dy.dim() && dy.numel());
  return readable(dy).rows();
}

// Makes the gradient before an activation that of its layers, whose results have these sizes.
inline void add_gradients(Differentiated& of, const BeforeActivation& before, Sizes sizes) {
  const auto& [dh, maxima] = before;
  const auto part_of = [](const Tensor& all, size_t i, int64_t count) {
    if (count == 1) return all;
    const int64_t N = all.size(-1), part = all.numel() / count;
    return all.viewed(Shape{part / N, N}, Shape{N, 1}, static_cast<int64_t>(i) * part);
  };
  const auto count = static_cast<int64_t>(of.weights.size());
  for (size_t i = 0; i < of.weights.size(); ++i) {
    of.dys.push_back(part_of(dh, i, count));
    // Scales of blocks need no maxima of rows or of the whole matrix.
    if (!of.how.grad.by_block()) of.maxima[i] = part_of(maxima, i, count);
  }
  of.sizes = sizes;
}

// The layers whose gradients of weights are found together, and room for the transposed gradients of their
// results in 8 bits, one after another.
class StackedGradients {
 public:
  StackedGradients(
      const std::vector<Pieces>& dys, std::vector<size_t> layers, const Cast& cast) {
    const auto is_whole = [&](size_t i) { return is_multiple(dys[i].columns()); };
    if (layers.size() < 2 || layers.size() > MOST_PARTS || cast.by_block() ||
        !std::all_of(layers.begin(), layers.end(), is_whole)) {
      return;
    }
    layers_ = std::move(layers);
    int64_t N = 0;
    for (const size_t i : layers_) {
      outputs_.push_back(dys[i].columns());
      N += outputs_.back();
    }
    const auto& like = dys[layers_[0]].like();
    columns_ = {
        empty(Shape{N, padded(like.size(0))}, like, cast.dtype), empty(Shape{N, 1}, like, FLOAT32)};
  }

  // Where those of a layer go, if it is one of these.
  Scaled place(size_t layer) const {
    int64_t first = 0;
    for (size_t i = 0; i < layers_.size(); first += outputs_[i++]) {
      if (layers_[i] != layer) continue;
      const auto& [q, scale, of_blocks] = columns_;
      const int64_t N = outputs_[i], pitch = q.size(1);
      return {
          q.viewed(Shape{N, pitch}, Shape{pitch, 1}, first * pitch),
          scale.viewed(Shape{N, 1}, Shape{1, 1}, first)};
    }
    return {};
  }

  bool has(size_t layer) const {
    return std::find(layers_.begin(), layers_.end(), layer) != layers_.end();
  }

  // Puts the gradients of their weights where `found` has those of all layers.
  void add_to(Tensors& found, const Scaled& transposed, const EightBits& kernels) const {
    if (layers_.empty()) return;
    const auto dweights = weight_gradients(columns_, outputs_, transposed, kernels);
    for (size_t i = 0; i < layers_.size(); ++i) found[1 + layers_[i]] = dweights[i];
  }

 private:
  std::vector<size_t> layers_;
  std::vector<int64_t> outputs_;
  Scaled columns_;
};

// The gradient of the result of one layer, from those of its parts: in one piece where it is not quantized
// in parts, or is read as it is.
inline Pieces gradient_of_parts(const Tensors& dys, const GradientCasts& how, bool reads_rows) {
  Tensors parts;
  int64_t N = 0;
  bool are_multiples = true;
  for (const auto& dy : dys) {
    require_kernels(dy.defined() && is_beside(dy, dys[0]));
    parts.push_back(gradient_rows(dy));
    require_kernels(are_equal(Shape(dy.sizes(), 1), Shape(dys[0].sizes(), 1)));
    N += dy.size(-1);
    are_multiples = are_multiples && is_multiple(dy.size(-1));
  }
  const bool is_served = parts.size() <= MOST_MATRICES && are_multiples;
  if (reads_rows || how.grad.by_block() || !is_served) return concatenated(parts, N);
  return Pieces(std::move(parts));
}

// The sums of the columns of a gradient.
inline Tensor sum_of_rows(const Pieces& dy) {
  const auto kernels = kernels_for(dy.like(), false);
  const auto sum = empty(Shape{dy.columns()}, dy.like());
  int64_t first = 0;
  for (const auto& part : dy) {
    const int64_t N = part.size(1);
    sum_of_rows(part, kernels.passes, N == sum.size(0) ? sum : sum.narrowed(first, N));
    first += N;
  }
  return sum;
}

// The gradients of the rows, of each weight and of each bias, if wanted. Where the rows are an activation
// whose input is given, that of the input is `before`, and there is none of the rows.
inline Tensors layer_gradients(
    const Differentiated& of, const std::vector<bool>& wanted,
    const ActivationInput* input = nullptr, BeforeActivation* before = nullptr) {
  const auto& [grad, by, of_rows, has_fp8_wgrad, are_kept] = of.how;
  const size_t count = of.weights.size();
  Tensors found(1 + 2 * count);
  const auto transposes = [&](size_t i) { return wanted[1 + i] && has_fp8_wgrad; };
  // A gradient with maxima is quantized when its products are next: it takes more memory than others.
  const auto is_early = [&](size_t i) {
    return (wanted[0] || transposes(i)) && !of.maxima[i].defined();
  };
  std::vector<size_t> together;
  for (size_t i = 0; i < count; ++i) {
    if (of.dys[i].defined() && transposes(i) && is_early(i)) together.push_back(i);
  }
  const StackedGradients stacked(of.dys, std::move(together), grad);
  const auto gradient = [&](size_t i) {
    return Unquantized{
        of.dys[i], grad, wanted[0], transposes(i), of.maxima[i], stacked.place(i)};
  };
  std::vector<Unquantized> early;
  bool transposes_rows = false;
  Tensor like;
  for (size_t i = 0; i < count; ++i) {
    const auto& dy = of.dys[i];
    if (!dy.defined()) continue;
    const Tensor& rows = of.transposed.defined() ? of.transposed.q : of.z;
    require_kernels(is_beside(dy.like(), rows));
    require_kernels(
        of.transposed.defined() ? padded(dy.rows()) == rows.size(1) : dy.rows() == rows.size(0));
    like = dy.like();
    if (is_early(i)) early.push_back(gradient(i));
    if (wanted[0] && !of.scales[i].defined()) {
      require_kernels(!frozen_level && is_beside(of.weights[i], like));
      early.push_back({of.weights[i], by, false, true});
    }
    transposes_rows |= transposes(i) && !of.transposed.defined();
  }
  if (!like.defined()) return found;
  if (transposes_rows) early.push_back({of.z, of_rows, false, true});
  const auto& kernels = eight_bits_of(like);
  Rooms rooms;
  expect(rooms, early);
  if (input && wanted[0]) {
    require_kernels(input->h.dim() == 2);
    const int64_t columns = input->h.size(1) / input->layers;
    rooms.expect(input->h.size(0), columns, grad, true, input->layers);
  }
  auto made = quantized(early, kernels, rooms);
  const auto transposed = transposes_rows ? made.back().transposed : of.transposed;
  size_t next = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto& dy = of.dys[i];
    if (!dy.defined()) continue;
    Quantized q;
    if (is_early(i)) {
      q = std::move(made[next++]);
    } else if (wanted[0] || transposes(i)) {
      q = quantized(gradient(i), kernels, rooms);
    }
    if (wanted[0]) {
      const Layer layer{
          of.scales[i].defined() ? Scaled{of.weights[i], of.scales[i], by.by_block()}
                                 : std::move(made[next++].transposed),
          {}};
      if (input) {
        *before =
            product_before_activation(q.plain, layer, *input, grad, are_kept, kernels, rooms);
      } else {
        // The gradients of the layers before are added to it.
        const auto before_it = found[0].defined() ? found[0].rows() : found[0];
        found[0] = product(
            q.plain, layer, of.sizes, are_kept, kernels, 0, {}, nullptr, before_it);
      }
    }
    if (transposes(i)) {
      if (!stacked.has(i)) {
        found[1 + i] = weight_gradients(q.transposed, {dy.columns()}, transposed, kernels)[0];
      }
    } else if (wanted[1 + i]) {
      const auto& rows = dy.whole();
      found[1 + i] = empty(Shape{rows.size(1), of.z.size(1)}, rows);
      mm(found[1 + i], rows.transposed(), of.z);
    }
    if (wanted[1 + count + i]) {
      found[1 + count + i] = sum_of_rows(dy);
    }
  }
  stacked.add_to(found, transposed, kernels);
  return found;
}

// Of one layer without an activation, gradients may be those of consecutive columns of its result.
inline Handles fp8_layers_backward(
    Given z, Optional z_scale, Optional h, std::string activation, Optionals grad_outputs, Handles weights, Optionals weight_scales,
    std::string grad_scaling, bool is_e5m2, std::string weight_scaling, std::string scaling,
    bool power_of_two, bool has_fp8_wgrad, std::vector<int64_t> wanted, bool are_kept) {
  const auto run = [&] {
    const OnDevice on_device(tensor_of(z));
    const Cast grad(is_e5m2 ? E5M2 : E4M3, grad_scaling, power_of_two);
    auto of = differentiated(
        z, z_scale, weights, weight_scales,
        {grad, Cast(E4M3, weight_scaling, power_of_two), Cast(E4M3, scaling, power_of_two),
         has_fp8_wgrad, are_kept});
    const size_t count = weights.size();
    std::vector<bool> flags(1 + 2 * count);
    for (const int64_t place : wanted) flags.at(static_cast<size_t>(place)) = true;
    if (flags[0]) require_weights(weights, weight_scales);
    Tensors dys;
    for (const auto& dy : grad_outputs) dys.push_back(tensor_of(dy));
    const int64_t number = number_of(activation);
    const bool is_parted = count == 1 && dys.size() > 1 && !number;
    require_kernels(is_parted || dys.size() == (number ? 1 : count));
    for (const auto& dy : dys) {
      if (dy.defined()) of.sizes = dy.sizes();
      if (!number && !is_parted) of.dys.push_back(dy.defined() ? gradient_rows(dy) : dy);
    }
    if (is_parted) {
      const auto& dy = of.dys.emplace_back(gradient_of_parts(dys, of.how, flags[1] && !has_fp8_wgrad));
      require_kernels(dy.columns() == of.weights[0].size(of.scales[0].defined() ? 1 : 0));
    }
    if (number) {
      const auto da = gradient_rows(dys[0]);
      const ActivationInput input{
          readable(tensor_of(h)), number, static_cast<int64_t>(count)};
      const auto before = before_activation(da, input, grad, flags[0], eight_bits_of(da));
      add_gradients(of, before, dys[0].sizes());
    }
    const auto found = layer_gradients(of, flags);
    Handles all;
    for (const int64_t place : wanted) all.push_back(given_of(found[static_cast<size_t>(place)]));
    return all;
  };
  return by_kernels(
      run, "fused_norm::fp8_layers_backward_by_python", z, z_scale, h, activation, grad_outputs,
      weights, weight_scales,
      grad_scaling, is_e5m2, weight_scaling, scaling, power_of_two, has_fp8_wgrad, wanted,
      are_kept);
}

}  // namespace fused_norm
