// A norm whose rows are quantized in both layouts, as PyTorch's op: what layers multiply, and what the
// gradients of their weights need.

#pragma once

#include "eight_bits_ops.h"

namespace fused_norm {

// The normalized rows in 8 bits and a scale for each row, the same of their transpose, rstd, and the mean
// for a norm that has one.
inline Handles fp8_norm_rows(
    Given x, Optional gamma, Optional beta, std::string normalization, double eps,
    double weight_offset, std::string scaling, bool power_of_two) {
  const auto run = [&] {
    const auto given = tensor_of(x);
    require_kernels(given.dtype() == BFLOAT16 && given.dim() && given.numel());
    const OnDevice on_device(given);
    const auto& kernels = eight_bits_of(given);
    const Cast cast(E4M3, scaling, power_of_two);
    require_kernels(!cast.by_block());
    const int64_t K = given.size(-1), M = given.numel() / K;
    const auto parameter = [&](const Tensor& v) {
      require_kernels(
          !v.defined() || (is_beside(v, given) && v.dtype() == BFLOAT16 &&
                           are_equal(v.sizes(), Shape{K})));
      return readable(v);
    };
    NormOfRows norm{
        {number_of(normalization), 0, eps, weight_offset}, parameter(tensor_of(gamma)),
        parameter(tensor_of(beta)), {}, empty(Shape(given.sizes(), 1), given, FLOAT32)};
    if (has_mean(norm.spec)) norm.mean = empty(norm.rstd.sizes(), given, FLOAT32);
    const std::vector<Unquantized> rows{{dense(given).rows(), cast, true, true}};
    Rooms rooms;
    expect(rooms, rows);
    auto [plain, transposed] = quantized(rows, kernels, rooms, &norm)[0];
    plain.q = plain.q.viewed(given.sizes(), dense_strides(given.sizes()));
    Handles all;
    append(all, plain);
    append(all, transposed);
    all.push_back(given_of(norm.rstd));
    if (norm.mean.defined()) all.push_back(given_of(norm.mean));
    return all;
  };
  return by_kernels(
      run, "fused_norm::fp8_norm_rows_by_python", x, gamma, beta, normalization, eps, weight_offset,
      scaling, power_of_two);
}

}  // namespace fused_norm
