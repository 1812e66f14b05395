// The record of a call, which kernels receive by address.

#pragma once

#include <cstdint>

namespace fused_norm {

// `Part` and `Call` in op/call.mojo, which documents the fields.
struct Part {
  int64_t N;
  void *weight, *bias, *y, *dy, *scale;
};

// `Matrix` in op/passes/matrices.mojo, which documents the fields.
struct Matrix {
  int64_t M, K;
  void *x, *maxima, *z, *z_scale, *zt, *zt_scale;
  int64_t pitch, whole, skipped;
};

struct Call {
  int64_t M;
  double eps;
  int64_t context, threads, in_graph, may_keep, accumulate, invariant;
  void *x, *y, *mean, *rstd, *z, *dy, *dz, *dx, *dgamma, *dbeta, *dweight, *dbias;
  int64_t normalization;
  double weight_offset;
  int64_t has_statistics;
  void *residual, *sum, *dsum;
  int64_t groups;
  void *scale, *shift, *gate;
  int64_t group_pitch;
  void *dscale, *dshift;
  int64_t activation;
  void *h, *a, *da, *dh;
  void* parts;
  int64_t part_count, pitch, eight_bits, power_of_two, one_scale, block_scales;
  void *z_scale, *y_scale;
  double y_one_scale;
  void *zt, *zt_scale, *workspace;
  int64_t strategy, workspace_bytes;
  int64_t K, N;
  void *gamma, *beta, *weight, *bias, *up, *up_bias;
  int64_t norm_is_float32, narrow;
  void *weight_scale, *up_scale, *fold_weight, *fold_sums, *fold_constants;
};

// The strategies of op/norm_linear/plan.mojo.
enum Strategy : int64_t { DECLINED, FUSED, KEPT_FOLD, NEW_FOLD, AROUND_PRODUCTS };

// Limits of the kernels: 32 bits for the elements of a row, 16 bits for a group's index in a grid.
constexpr int64_t LONGEST_ROW = 2147483647, MOST_GROUPS = 65535;
// A thread on a CPU keeps a workspace of up to this many bytes for its next calls.
constexpr int64_t MOST_KEPT = 33554432;
// Most Linear layers whose products one launch computes.
constexpr int64_t MOST_PARTS = 3;
// Most matrices that one launch quantizes.
constexpr int64_t MOST_MATRICES = 8;
// Elements along each side of a block with its own scale; and the values of `block_scales`.
constexpr int64_t SCALE_BLOCK = 128, VECTORS = 1, SQUARES = 2;
// An activation from this number on is a gate.
constexpr int64_t GATED = 8;
// The activation that is not smooth, nor is the gate of this plus GATED.
constexpr int64_t RELU = 1;
// The number of "no norm": a product of rows that are not normalized.
constexpr int64_t NO_NORM = 2;

// The address of a result in a record that is only planned.
inline void* const WANTED = reinterpret_cast<void*>(1);

using Function = int64_t (*)(Call*);

// `RowCall` in op/rows/op.mojo, which documents the fields.
struct RowCall {
  int64_t M, K, context, threads, accumulate;
  void* parameter;
  int64_t parameter_is_float32;
  void *parameter_gradient, *workspace, *outputs[2], *inputs[3];
};

// Runs the op at an index of OPS in that file.
using RowFunction = int64_t (*)(int64_t op, RowCall*);

}  // namespace fused_norm
