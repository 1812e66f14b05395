// The chain of a call as C functions on PyTorch's stable tensor handles. A node of autograd and Python
// of any version call it.

#pragma once

#include <cstddef>
#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace fused_norm {

// `Spec` in composition.py; a norm and an activation are their numbers in the record. Python passes it
// to the node as bytes, without padding.
struct Spec {
  int64_t normalization = 0, activation = 0;
  double eps = 0, weight_offset = 0;
  bool is_joined = false, returns_sum = false, returns_norm = false, recompute = false,
       invariant = false, unused[3] = {};

  // Activations from 8 on are gates.
  bool is_gated() const { return activation >= 8; }
};

// The index of each tensor of a call, as in composition.py; weights and then biases follow.
enum Place : size_t {
  X, RESIDUAL, GAMMA, BETA, SCALE, SHIFT, MEAN, RSTD, OUT_WEIGHT, OUT_BIAS, OUT_RESIDUAL, NAMED
};

// The index of each result: an output for each weight, or one; then these; then as many products,
// which are kept if an activation follows.
enum Extra : size_t { SUM, NORM, KEPT_MEAN, KEPT_RSTD, EXTRAS };

// Where a call is made: -1 to ask Python. A CPU needs neither.
struct Conditions {
  int32_t is_alone = -1, may_use_tf32 = -1;
};

// Instead of a norm's number, that of `trainable_eps_layer_norm`: no Linear layer follows, x is at X, o
// at GAMMA, and the result is the normalized rows.
constexpr int64_t TRAINABLE_EPS = -1;

// A question to Python, which chooses and builds kernels.
struct Question {
  int32_t dtype, is_cpu, device, is_rows;
  int64_t stream, normalization;
  int32_t is_alone, may_use_tf32, invariant, is_eight_bits;
};

// Two files with C functions, loaded, each with the context of its calls (for row ops, theirs instead of
// the passes'; for 8-bit matrices, theirs instead of the product's); the strategy that calls take,
// without and with frozen parameters, 0 for the fastest; and the costs measured on such a CPU
// (`Device.as_array` in devices/costs.py). No file if PyTorch's own product is to be used.
struct Answer {
  const char *product, *passes;
  int64_t product_context, passes_context, strategy, kept_strategy;
  const double* costs;
};

// Functions and constants that Python provides.
struct Python {
  // Returns 0; 1 if there are no kernels; or 2, with an error message.
  int (*find)(const Question*, Answer*, const char** error) = nullptr;
  // Bits: no collective is running (1); float32 may be multiplied in tf32 (2).
  int (*conditions)(int32_t device) = nullptr;
  // Initializes PyTorch's products in this thread; 0 if that has to wait.
  int (*prepare)(int32_t device) = nullptr;
  // The numbers of norms and activations: "layer_norm=0 rms_norm=1 ...".
  const char* numbers = "";
  // The norms whose rows have a mean, as a bit at each norm's number.
  int with_mean = 0;
  // Kernels are looked up again if this number has changed.
  int told = 0;
};

// Success; tensors that kernels do not take in this layout; an error.
enum Status : int { DONE, LEFT, FAILED };

// What `chain_functions` returns.
struct Chain {
  // Writes 2 count + EXTRAS results, null for none, of NAMED + 2 count tensors.
  int (*forward)(
      const Spec*, Conditions, size_t count, const AtenTensorHandle* tensors, int keeps,
      AtenTensorHandle* results);
  // Writes NAMED + 2 count gradients: of tensors that require one and that a result with a gradient
  // depends on; null for the others. The products follow the tensors.
  int (*backward)(
      const Spec*, Conditions, size_t count, size_t tensor_count, const AtenTensorHandle* tensors,
      size_t grad_count, const AtenTensorHandle* grads, const uint8_t* needed,
      AtenTensorHandle* gradients);
  // The error message of this thread's last call.
  const char* (*error)();
};

}  // namespace fused_norm
