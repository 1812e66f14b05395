// Quantizes bfloat16 matrices to 8 bits, untransposed and transposed, with Hopper's kernels. What they
// decline is left to PyTorch's ops.

#pragma once

#include "linear.h"

namespace fused_norm {

// The alignment of operands and of their rows, in bytes.
constexpr int64_t MULTIPLE = 16;

inline void require_kernels(bool holds) {
  if (!holds) throw Declined();
}

inline bool is_beside(const Tensor& v, const Tensor& other) {
  return v.device_type() == other.device_type() && (v.is_cpu() || v.device() == other.device());
}

// The same values, aligned so that kernels can read 16 bytes at a time.
inline Tensor readable(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_contiguous()) return dense(tensor);
  const bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data()) % MULTIPLE == 0;
  return is_aligned ? tensor : cloned(tensor);
}

inline bool is_multiple(int64_t size) {
  return size > 0 && size % MULTIPLE == 0;
}

// The longest rows whose norm is quantized by maxima, of rows and columns or of all
// (op/passes/norm_maxima.mojo).
constexpr int64_t LONGEST_NORM = 16384;

// A size rounded up to a multiple of that.
inline int64_t padded(int64_t size) {
  return (size + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
}

// The elements that share a scale: a row, the whole matrix, 128 elements of a row, or 128 by 128.
enum class Scaling { ROW, TENSOR, VECTORS, SQUARES };

inline Scaling scaling_of(const std::string& name) {
  if (name == "row") return Scaling::ROW;
  if (name == "tensor") return Scaling::TENSOR;
  if (name == "1x128") return Scaling::VECTORS;
  require_kernels(name == "128x128");
  return Scaling::SQUARES;
}

inline bool are_blocks(Scaling scaling) {
  return scaling == Scaling::VECTORS || scaling == Scaling::SQUARES;
}

inline int64_t blocks_of(int64_t size) {
  return (size + SCALE_BLOCK - 1) / SCALE_BLOCK;
}

// The kernels on the current stream of a tensor's device.
inline const EightBits& eight_bits_of(const Tensor& x) {
  Question question{};
  question.dtype = BFLOAT16;
  question.is_cpu = x.is_cpu();
  question.is_eight_bits = 1;
  if (!x.is_cpu()) {
    question.device = x.device();
    question.stream = reinterpret_cast<int64_t>(current_stream(question.device));
  }
  const auto& found = loaded(question).eight_bits;
  require_kernels(found.linear);
  return found;
}

// How a matrix is quantized: its type, which elements share a scale, and whether scales are rounded up.
struct Cast {
  DType dtype;
  Scaling scaling;
  bool power_of_two;

  Cast(DType dtype, const std::string& scaling, bool power_of_two)
      : dtype(dtype), scaling(scaling_of(scaling)), power_of_two(power_of_two) {}

  bool by_row() const { return scaling == Scaling::ROW; }
  bool by_block() const { return are_blocks(scaling); }
};

// The number of a type in a record, as in op/rows/types.mojo.
inline int64_t number_of(DType dtype) {
  return dtype == E5M2 ? 5 : 4;
}

// An 8-bit matrix, with a scale for each row [M, 1], which may all be one; with one scale [1, 1]; or with
// a scale for each block.
struct Scaled {
  Tensor q, scale;
  bool of_blocks = false;

  bool defined() const { return q.defined(); }
};

struct Quantized {
  Scaled plain, transposed;
};

// Memory for the maxima of matrices, zeros: one launch makes that of all that are expected.
class Rooms {
 public:
  // A matrix [M, K] that `quantized` may need maxima of, with or without its transpose.
  void expect(int64_t M, int64_t K, const Cast& cast, bool transposed) {
    if (!cast.by_block() && (transposed || !cast.by_row())) expected_ += elements(M, K, cast, true);
  }

  // How many elements there are for the maxima of columns, and of rows for `plain`, or for the single
  // maximum: each takes the bits of two elements, and kernels read four maxima together.
  static int64_t elements(int64_t M, int64_t K, const Cast& cast, bool plain) {
    const int64_t count = cast.by_row() ? K + (plain ? M : 0) : 1;
    return 2 * ((count + 3) / 4 * 4);
  }

  Tensor take(
      const Tensor& like, int64_t M, int64_t K, const Cast& cast, bool plain, int64_t matrices = 1) {
    const int64_t each = elements(M, K, cast, plain), count = matrices * each;
    const Shape shape{matrices, each};
    if (!all_.defined() && count <= expected_) all_ = zeros(Shape{expected_}, like);
    if (!all_.defined() || used_ + count > all_.numel()) return zeros(shape, like);
    used_ += count;
    return all_.viewed(shape, Shape{each, 1}, used_ - count);
  }

 private:
  Tensor all_;
  int64_t expected_ = 0, used_ = 0;
};

// An activation and its input h [M, N], for a gate [M, 2 N], which one layer computes or two.
struct ActivationInput {
  Tensor h;
  int64_t activation, layers;

  int64_t halves() const { return activation >= GATED ? 2 : 1; }
};

// The gradient dh of an activation's input: [M, N]; for a gate [M, 2 N] for one layer or [2, M, N] for
// two. Also its maxima.
struct BeforeActivation {
  Tensor dh, maxima;
};

// Gives a call that computes dh its input and memory for its results, from N and the type of `like`.
inline BeforeActivation add_gradient(
    Call& call, const ActivationInput& of, int64_t N, const Tensor& like, const Cast& cast,
    bool plain, Rooms& rooms) {
  const auto& [h, activation, layers] = of;
  const int64_t M = call.M, halves = of.halves();
  require_kernels(
      h.dtype() == BFLOAT16 && is_beside(h, like) && are_equal(h.sizes(), Shape{M, halves * N}) &&
      N % 8 == 0 && N <= LONGEST_ROW / 2 && (layers == 1 || layers == halves));
  BeforeActivation found;
  const Shape shape = layers == 2 ? Shape{2, M, N} : Shape{M, halves * N};
  found.dh = empty(shape, like, BFLOAT16);
  found.maxima = rooms.take(found.dh, M, halves / layers * N, cast, plain, layers);
  call.activation = activation;
  call.part_count = layers;
  call.h = address(h);
  call.one_scale = !cast.by_row();
  call.workspace = address(found.maxima);
  return found;
}

// dh from the gradient da [M, N] of the activation.
inline BeforeActivation before_activation(
    const Tensor& da, const ActivationInput& of, const Cast& cast, bool plain,
    const EightBits& kernels) {
  auto call = rows_call(da.size(0), 0, kernels.context);
  Rooms rooms;
  const auto found = add_gradient(call, of, da.size(1), da, cast, plain, rooms);
  call.K = da.size(1);
  call.da = address(da);
  call.x = address(found.dh);
  // Its rows are quantized later, with their maxima.
  if (plain) call.z = address(found.dh);
  launch(kernels.maxima, call, da);
  return found;
}

// The fields of a record for a matrix v [M, K] and its cast, whichever results are wanted.
inline Call quantizing_call(const Tensor& v, const Cast& cast, const EightBits& kernels) {
  auto call = rows_call(v.size(0), 0, kernels.context);
  call.K = v.size(1);
  call.x = address(v);
  call.eight_bits = number_of(cast.dtype);
  call.power_of_two = cast.power_of_two;
  return call;
}

// `quantized` with scales of blocks: untransposed rows only, since nothing multiplies blocks of columns.
inline Quantized quantized_by_blocks(
    const Tensor& v, const Cast& cast, bool plain, bool transposed, const EightBits& kernels) {
  const int64_t M = v.size(0), K = v.size(1);
  const bool is_square = cast.scaling == Scaling::SQUARES;
  require_kernels(is_multiple(K) && K <= LONGEST_ROW && (is_square ? cast.dtype == E4M3 : !transposed));
  // A grid has any number of blocks along its first dimension, at most 65535 along the other.
  require_kernels(blocks_of(is_square ? M : K) <= MOST_GROUPS);
  const int64_t rows = is_square ? blocks_of(M) : M;
  Quantized found;
  auto call = quantizing_call(v, cast, kernels);
  call.block_scales = is_square ? SQUARES : VECTORS;
  if (plain) {
    found.plain = {
        empty(Shape{M, K}, v, cast.dtype), empty(Shape{rows, blocks_of(K)}, v, FLOAT32), true};
    call.z = address(found.plain.q);
    call.z_scale = address(found.plain.scale);
  }
  if (transposed) {
    call.pitch = padded(M);
    found.transposed = {
        empty(Shape{K, call.pitch}, v, cast.dtype),
        empty(Shape{blocks_of(K), blocks_of(M)}, v, FLOAT32), true};
    call.zt = address(found.transposed.q);
    call.zt_scale = address(found.transposed.scale);
  }
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

// A matrix [M, K], untransposed and transposed to [K, M] padded with zeros to a multiple of 16, if wanted;
// or a norm of it, in e4m3. Maxima that are not given are computed here.
inline Quantized quantized(
    const Tensor& given, const Cast& cast, bool plain, bool transposed, const EightBits& kernels,
    Rooms& rooms, Tensor maxima = {}, const NormOfRows* norm = nullptr) {
  require_kernels(
      given.dim() == 2 && given.dtype() == BFLOAT16 && given.numel() && given.data());
  const auto v = readable(given);
  if (cast.by_block()) return quantized_by_blocks(v, cast, plain, transposed, kernels);
  const int64_t M = v.size(0), K = v.size(1);
  const bool by_maxima = maxima.defined() || transposed || !cast.by_row();
  require_kernels(K <= LONGEST_ROW && (K % 8 == 0 || !by_maxima));
  Quantized found;
  auto call = quantizing_call(v, cast, kernels);
  call.one_scale = !cast.by_row();
  if (norm) {
    require_kernels(by_maxima && cast.dtype == E4M3 && K <= LONGEST_NORM);
    norm->describe(call);
  }
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
  if (!are_there) maxima = rooms.take(v, M, K, cast, plain);
  call.workspace = address(maxima);
  if (!are_there) launch(kernels.maxima, call, v);
  launch(kernels.quantize_by_maxima, call, v);
  return found;
}

}  // namespace fused_norm
