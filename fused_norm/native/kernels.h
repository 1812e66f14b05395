// The kernels as C++ calls them: by address, with the tensors of a call in one struct.

#pragma once

#include <atomic>
#include <optional>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace fused_norm {

using at::Tensor;

// `Call` in op/layernorm_linear/call.mojo.
struct Call {
  void *dx, *dln_weight, *dln_bias, *dweight, *dbias, *dy, *y, *x, *ln_weight, *ln_bias, *weight;
  void *bias, *mean, *rstd, *workspace;
  int64_t M, K, N, ln_is_float32, threads, context;
  double eps;
};
using Function = int64_t (*)(const Call*);

// A pass of one way. Both functions are null where it has none.
struct Pass {
  Function workspace = nullptr;  // bytes, or negative if the call is for Python
  Function run = nullptr;        // 0, or what else makes it a call for Python
};

// What Python knows of a way.
struct Kernels {
  Pass forward, backward;
  int64_t context = 0;
};

// Set in a child: OpenMP's workers do not survive a fork, and waiting for them would hang.
inline std::atomic<bool> forked{false};

inline std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

inline void* address(const Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

inline at::ScalarType statistics_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// The tensors that both passes have; undefined for None.
struct Inputs {
  const Tensor &x, &ln_weight, &ln_bias, &weight, &bias, &mean, &rstd;

  const Tensor& affine() const {
    return ln_weight.defined() ? ln_weight : ln_bias;
  }
};

// Tells ordinary tensors of a device, of one kind of keys, in dense memory.
struct Plain {
  c10::DispatchKeySet keys;
  std::optional<c10::Stream> stream;

  bool operator()(const Tensor& tensor, int64_t count, at::ScalarType dtype) const {
    return tensor.key_set() == keys && tensor.scalar_type() == dtype &&
        tensor.numel() == count && tensor.is_contiguous() &&
        (!stream || tensor.device() == stream->device()) &&
        !torch::autograd::isFwGradDefined(tensor);
  }

  bool may_be(const Tensor& tensor, int64_t count, at::ScalarType dtype) const {
    return !tensor.defined() || (*this)(tensor, count, dtype);
  }
};

// A call on these inputs and on `rows` [M, N], which is y or its gradient; nothing where a tensor
// is not as the kernels need it.
inline std::optional<Call> call_on(
    const Inputs& inputs, const Tensor& rows, const Plain& is_plain, int64_t context, double eps) {
  const auto& [x, ln_weight, ln_bias, weight, bias, mean, rstd] = inputs;
  if (weight.dim() != 2) return std::nullopt;
  const int64_t N = weight.size(0), K = weight.size(1), M = mean.numel();
  const auto dtype = x.scalar_type(), wide = statistics_dtype(dtype);
  const auto& affine = inputs.affine();
  const auto affine_dtype = affine.defined() ? affine.scalar_type() : dtype;
  if (!is_plain(rows, M * N, dtype) || !is_plain(x, M * K, dtype) ||
      !is_plain(weight, N * K, dtype) || !is_plain.may_be(bias, N, dtype) ||
      !is_plain(mean, M, wide) || !is_plain(rstd, M, wide) ||
      !is_plain.may_be(ln_weight, K, affine_dtype) || !is_plain.may_be(ln_bias, K, affine_dtype) ||
      (affine_dtype != dtype && affine_dtype != at::kFloat)) {
    return std::nullopt;
  }
  Call call{};
  call.x = address(x);
  call.ln_weight = address(ln_weight);
  call.ln_bias = address(ln_bias);
  call.weight = address(weight);
  call.bias = address(bias);
  call.mean = address(mean);
  call.rstd = address(rstd);
  call.M = M;
  call.K = K;
  call.N = N;
  call.ln_is_float32 = affine_dtype != dtype;
  call.threads = forked ? 1 : at::get_num_threads();
  call.context = context;
  call.eps = eps;
  return call;
}

// Allocates the workspace of a call; nothing where the call is for Python.
inline std::optional<Tensor> workspace_of(const Pass& pass, Call& call, const Tensor& x) {
  const int64_t size = pass.workspace(&call);
  if (size < 0) return std::nullopt;
  Tensor workspace;
  if (size > 0) workspace = at::empty({size}, x.options().dtype(at::kByte));
  call.workspace = address(workspace);
  return workspace;
}

}  // namespace fused_norm
