// How matrices are quantized to 8 bits by Hopper's kernels, room for their largest magnitudes, and the
// gradient before an activation, which has its own found. What kernels decline is left to PyTorch's ops.

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
  // A matrix [M, K], or several, whose maxima are found, if it has any.
  void expect(int64_t M, int64_t K, const Cast& cast, bool plain, int64_t matrices = 1) {
    if (!cast.by_block()) expected_ += matrices * elements(M, K, cast, plain);
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
    if (!all_.defined() && count <= expected_) all_ = zeros(Shape{expected_}, like, BFLOAT16);
    if (!all_.defined() || used_ + count > all_.numel()) return zeros(shape, like, BFLOAT16);
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

}  // namespace fused_norm
