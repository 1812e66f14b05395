// Quantizes bfloat16 matrices to 8 bits, untransposed and transposed, with Hopper's kernels: several in one
// launch, which may be parts of one.

#pragma once

#include "eight_bits.h"

namespace fused_norm {

// A matrix [M, N] in one piece, or in parts [M, N_i] side by side; or none.
class Pieces {
 public:
  Pieces() = default;
  Pieces(const Tensor& whole) {
    if (whole.defined()) parts_.push_back(whole);
  }
  explicit Pieces(Tensors parts) : parts_(std::move(parts)) {}

  bool defined() const { return !parts_.empty(); }
  size_t count() const { return parts_.size(); }
  int64_t rows() const { return parts_[0].size(0); }
  int64_t columns() const {
    int64_t N = 0;
    for (const auto& part : parts_) N += part.size(1);
    return N;
  }
  // A tensor of its device and dtype.
  const Tensor& like() const { return parts_[0]; }
  // The matrix, of one piece.
  const Tensor& whole() const {
    require_kernels(parts_.size() == 1);
    return parts_[0];
  }

  auto begin() { return parts_.begin(); }
  auto end() { return parts_.end(); }
  auto begin() const { return parts_.begin(); }
  auto end() const { return parts_.end(); }

 private:
  Tensors parts_;
};

// The record of matrices with one cast.
inline Call quantizing_call(std::span<Matrix> all, const Cast& cast, const EightBits& kernels) {
  auto call = rows_call(0, 0, kernels.context);
  call.eight_bits = number_of(cast.dtype);
  call.power_of_two = cast.power_of_two;
  call.one_scale = cast.scaling == Scaling::TENSOR;
  if (all.size() == 1) {
    const auto& only = all[0];
    call.M = only.M;
    call.K = only.K;
    call.x = only.x;
    call.workspace = only.maxima;
    call.z = only.z;
    call.z_scale = only.z_scale;
    call.zt = only.zt;
    call.zt_scale = only.zt_scale;
    call.pitch = only.pitch;
  } else {
    call.parts = all.data();
    call.part_count = static_cast<int64_t>(all.size());
  }
  return call;
}

// A matrix in 8 bits with scales of blocks: untransposed rows only, since nothing multiplies blocks of columns.
inline Quantized quantized_by_blocks(
    const Tensor& v, const Cast& cast, bool plain, bool transposed, const EightBits& kernels) {
  const int64_t M = v.size(0), K = v.size(1);
  const bool is_square = cast.scaling == Scaling::SQUARES;
  require_kernels(is_multiple(K) && K <= LONGEST_ROW && (is_square ? cast.dtype == E4M3 : !transposed));
  // A grid has any number of blocks along its first dimension, at most 65535 along the other.
  require_kernels(blocks_of(is_square ? M : K) <= MOST_GROUPS);
  const int64_t rows = is_square ? blocks_of(M) : M;
  Quantized found;
  Matrix own{M, K, address(v)};
  if (plain) {
    found.plain = {
        empty(Shape{M, K}, v, cast.dtype), empty(Shape{rows, blocks_of(K)}, v, FLOAT32), true};
    own.z = address(found.plain.q);
    own.z_scale = address(found.plain.scale);
  }
  if (transposed) {
    own.pitch = padded(M);
    found.transposed = {
        empty(Shape{K, own.pitch}, v, cast.dtype),
        empty(Shape{blocks_of(K), blocks_of(M)}, v, FLOAT32), true};
    own.zt = address(found.transposed.q);
    own.zt_scale = address(found.transposed.scale);
  }
  auto call = quantizing_call({&own, 1}, cast, kernels);
  call.block_scales = is_square ? SQUARES : VECTORS;
  launch(kernels.quantize, call, v);
  return found;
}

// The norm of rows [M, K] in bfloat16, with gamma and beta of that type if they are there, and where its
// statistics go: rstd [M], and mean [M] for a norm that has one.
struct NormOfRows {
  Spec spec;
  Tensor gamma, beta, mean, rstd;

  void describe(Call& call) const {
    call.normalization = spec.normalization;
    call.eps = spec.eps;
    call.weight_offset = spec.weight_offset;
    call.gamma = address(gamma);
    call.beta = address(beta);
    call.mean = address(mean);
    call.rstd = address(rstd);
  }
};

// A matrix [M, K], and which results are wanted: untransposed, and transposed to [K, M] padded with zeros
// to a multiple of 16. Maxima that are not given are found. The transposed one may have its place given.
struct Unquantized {
  Pieces v;
  Cast cast;
  bool plain, transposed;
  Tensor maxima{};
  Scaled place{};

  bool by_maxima() const {
    return !cast.by_block() &&
        (maxima.defined() || transposed || !cast.by_row() || v.count() > 1);
  }

  // The records of its parts, from what they have in common.
  std::vector<Matrix> records(Matrix own) const {
    std::vector<Matrix> found;
    if (v.count() > 1) own.whole = own.K;
    for (const auto& part : v) {
      own.x = address(part);
      own.K = part.size(1);
      found.push_back(own);
      own.skipped += own.K;
    }
    return found;
  }
};

// Counts the maxima that `quantized` finds.
inline void expect(Rooms& rooms, const std::vector<Unquantized>& all) {
  for (const auto& of : all) {
    const bool finds = of.v.like().dim() == 2 && of.by_maxima() && !of.maxima.defined();
    if (finds) rooms.expect(of.v.rows(), of.v.columns(), of.cast, of.plain);
  }
}

// Matrices of one cast that a launch takes, all parts of each, and those whose maxima are found first.
struct Together {
  Cast cast;
  std::vector<Matrix> all{}, unknown{};

  bool takes(const Cast& other, size_t count) const {
    return all.size() + count <= MOST_MATRICES && cast.dtype == other.dtype &&
        cast.scaling == other.scaling && cast.power_of_two == other.power_of_two;
  }
};

// Each matrix in 8 bits; or a norm of the only one, in e4m3.
inline std::vector<Quantized> quantized(
    std::vector<Unquantized> wanted, const EightBits& kernels, Rooms& rooms,
    const NormOfRows* norm = nullptr) {
  for (auto& of : wanted) {
    require_kernels(of.v.count() <= MOST_MATRICES);
    for (auto& v : of.v) {
      require_kernels(v.dim() == 2 && v.dtype() == BFLOAT16 && v.numel() && v.data());
      require_kernels(v.size(0) == of.v.rows() && is_beside(v, of.v.like()));
      require_kernels(v.size(1) % 8 == 0 || !of.by_maxima());
      v = readable(v);
    }
    require_kernels(of.v.columns() <= LONGEST_ROW);
  }
  std::vector<Quantized> found;
  std::vector<Together> launches;
  for (auto& of : wanted) {
    const auto& [pieces, cast, plain, transposed, maxima, place] = of;
    const auto& v = pieces.like();
    const int64_t M = pieces.rows(), K = pieces.columns();
    if (cast.by_block()) {
      found.push_back(quantized_by_blocks(pieces.whole(), cast, plain, transposed, kernels));
      continue;
    }
    auto& results = found.emplace_back();
    Matrix own{M, K, address(v)};
    if (plain) {
      results.plain = {empty(Shape{M, K}, v, cast.dtype), empty(Shape{M, 1}, v, FLOAT32)};
      own.z = address(results.plain.q);
      own.z_scale = address(results.plain.scale);
    }
    if (transposed) {
      own.pitch = padded(M);
      results.transposed =
          place.defined() ? place
                          : Scaled{empty(Shape{K, own.pitch}, v, cast.dtype), empty(Shape{K, 1}, v, FLOAT32)};
      own.zt = address(results.transposed.q);
      own.zt_scale = address(results.transposed.scale);
    }
    if (!of.by_maxima()) {
      auto call = quantizing_call({&own, 1}, cast, kernels);
      launch(kernels.quantize, call, v);
      continue;
    }
    const bool are_there = maxima.defined();
    if (!are_there) of.maxima = rooms.take(v, M, K, cast, plain);
    own.maxima = address(of.maxima);
    const auto parts = of.records(own);
    auto in = std::find_if(launches.begin(), launches.end(), [&](const Together& t) {
      return t.takes(cast, parts.size());
    });
    if (in == launches.end()) in = launches.insert(in, Together{cast});
    in->all.insert(in->all.end(), parts.begin(), parts.end());
    if (!are_there) in->unknown.insert(in->unknown.end(), parts.begin(), parts.end());
  }
  const auto run = [&](Function kernel, std::vector<Matrix>& all, const Cast& cast) {
    if (all.empty()) return;
    auto call = quantizing_call(all, cast, kernels);
    if (norm) norm->describe(call);
    launch(kernel, call, wanted[0].v.like());
  };
  for (auto& [cast, all, unknown] : launches) {
    require_kernels(!norm || (cast.dtype == E4M3 && all.size() == 1 && all[0].K <= LONGEST_NORM));
    run(kernels.maxima, unknown, cast);
    run(kernels.quantize_by_maxima, all, cast);
  }
  return found;
}

// The only one of these.
inline Quantized quantized(const Unquantized& only, const EightBits& kernels, Rooms& rooms) {
  return quantized(std::vector<Unquantized>{only}, kernels, rooms)[0];
}

}  // namespace fused_norm
