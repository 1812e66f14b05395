// The gradients of both layers of an MLP in 8 bits as PyTorch's op: the second layer's product stores the
// gradient before the activation.

#pragma once

#include "eight_bits_gradients.h"

namespace fused_norm {

inline Handles fp8_mlp_backward(
    Given z, Optional z_scale, Given h, std::string activation, Handles weights,
    Optionals weight_scales, Given a, Optional a_scale, Given out_weight, Optional out_scale,
    Given grad_output, std::string grad_scaling, bool is_e5m2, std::string weight_scaling,
    std::string scaling, bool power_of_two, bool has_fp8_wgrad, std::vector<int64_t> wanted,
    bool are_kept) {
  const auto run = [&] {
    const auto dy = tensor_of(grad_output);
    const OnDevice on_device(dy);
    const GradientCasts how{
        Cast(is_e5m2 ? E5M2 : E4M3, grad_scaling, power_of_two),
        Cast(E4M3, weight_scaling, power_of_two), Cast(E4M3, scaling, power_of_two),
        has_fp8_wgrad, are_kept};
    const int64_t number = number_of(activation);
    // The product has one formula, for smooth activations, and no scales of blocks.
    require_kernels(number % GATED && number % GATED != RELU);
    require_kernels(!how.grad.by_block() && !how.weight.by_block());
    auto first = differentiated(z, z_scale, weights, weight_scales, how);
    auto second = differentiated(a, a_scale, {out_weight}, {out_scale}, how);
    second.dys.push_back(gradient_rows(dy));
    second.sizes = dy.sizes();
    const size_t places = 1 + 2 * weights.size();
    std::vector<bool> of_first(places), of_second(3);
    for (const int64_t place : wanted) {
      const auto i = static_cast<size_t>(place);
      if (i < places) {
        of_first[i] = true;
        of_second[0] = true;
      } else {
        of_second.at(i - places + 1) = true;
      }
    }
    if (of_first[0]) require_weights(weights, weight_scales);
    if (of_second[0]) require_weights({out_weight}, {out_scale});
    const ActivationInput input{
        readable(tensor_of(h)), number, static_cast<int64_t>(weights.size())};
    BeforeActivation before;
    auto found = layer_gradients(second, of_second, &input, &before);
    Tensors all(places);
    if (of_second[0]) {
      add_gradients(first, before, dy.sizes());
      all = layer_gradients(first, of_first);
    }
    all.insert(all.end(), found.begin() + 1, found.end());
    Handles results;
    for (const int64_t place : wanted) results.push_back(given_of(all[static_cast<size_t>(place)]));
    return results;
  };
  return by_kernels(
      run, "fused_norm::fp8_mlp_backward_by_python", z, z_scale, h, activation, weights,
      weight_scales, a, a_scale, out_weight, out_scale, grad_output, grad_scaling, is_e5m2,
      weight_scaling, scaling, power_of_two, has_fp8_wgrad, wanted, are_kept);
}

}  // namespace fused_norm
