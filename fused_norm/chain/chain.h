// The chain of a call as C functions over PyTorch's stable tensor handles: what a node of autograd
// or Python calls, whatever their versions.

#pragma once

#include <cstddef>
#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace fused_norm {

// As `Spec` in composition.py; a norm and an activation are their numbers in the record. Python gives it
// to the node as bytes, which have no padding.
struct Spec {
  int64_t normalization = 0, activation = 0;
  double eps = 0, weight_offset = 0;
  bool is_joined = false, returns_sum = false, returns_norm = false, recompute = false,
       invariant = false, unused[3] = {};

  // An activation from 8 on is a gate.
  bool is_gated() const { return activation >= 8; }
};

// Where the tensors of a call stand, as in composition.py; weights and then biases follow.
enum Place : size_t {
  X, RESIDUAL, GAMMA, BETA, SCALE, SHIFT, MEAN, RSTD, OUT_WEIGHT, OUT_BIAS, OUT_RESIDUAL, NAMED
};

// Where results stand: an output for each weight, or one; then these; then as many products, which
// are kept before an activation.
enum Extra : size_t { SUM, NORM, KEPT_MEAN, KEPT_RSTD, EXTRAS };

// Where a call is made, as far as that is known: -1 has Python asked. A CPU needs neither.
struct Conditions {
  int32_t is_alone = -1, may_use_tf32 = -1;
};

// In place of a norm's number, that of `trainable_eps_layer_norm`: no Linear layer follows, x is at X, o
// at GAMMA, and the result is the normalized rows.
constexpr int64_t TRAINABLE_EPS = -1;

// A question to Python, which chooses and builds kernels.
struct Question {
  int32_t dtype, is_cpu, device, is_rows;
  int64_t stream, normalization;
  int32_t is_alone, may_use_tf32, invariant, is_eight_bits;
};

// Two files with C functions, loaded, each with the context of its calls (of row ops their own in place
// of the passes, of matrices in 8 bits in place of the product); the strategy that calls are to take,
// without and with parameters that are frozen, 0 for the fastest; and what was measured on such a CPU
// (`Device.as_array` in devices/costs.py). No file where PyTorch's own product is to be taken.
struct Answer {
  const char *product, *passes;
  int64_t product_context, passes_context, strategy, kept_strategy;
  const double* costs;
};

// Python's functions, and what they know.
struct Python {
  // Returns 0; or 1 where there are no kernels; or 2, and what is wrong.
  int (*find)(const Question*, Answer*, const char** error) = nullptr;
  // Whether no collective is running (1), and whether float32 may be multiplied in tf32 (2).
  int (*conditions)(int32_t device) = nullptr;
  // Has PyTorch's products ready in this thread; 0 where that has to wait.
  int (*prepare)(int32_t device) = nullptr;
  // The numbers of norms and activations: "layer_norm=0 rms_norm=1 ...".
  const char* numbers = "";
  // Of the norms whose rows have a mean, a bit at each number.
  int with_mean = 0;
  // Kernels are asked for anew, unless they were under the same number.
  int told = 0;
};

// 0; or 1 where the tensors are not such as kernels take as they stand; or 2 for an error.
enum Status : int { DONE, LEFT, FAILED };

// What the chain's `chain_functions` returns.
struct Chain {
  // Writes 2 count + EXTRAS results, null for none, of NAMED + 2 count tensors.
  int (*forward)(
      const Spec*, Conditions, size_t count, const AtenTensorHandle* tensors, int keeps,
      AtenTensorHandle* results);
  // Writes NAMED + 2 count gradients: of the tensors that need one those that depend on the results'
  // gradients that are there, null for the others. The products follow the tensors.
  int (*backward)(
      const Spec*, Conditions, size_t count, size_t tensor_count, const AtenTensorHandle* tensors,
      size_t grad_count, const AtenTensorHandle* grads, const uint8_t* needed,
      AtenTensorHandle* gradients);
  // What went wrong in this thread's last call.
  const char* (*error)();
};

}  // namespace fused_norm
