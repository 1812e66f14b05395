// The kernels as C++ calls them: by address, with a call's tensors in one record.

#pragma once

#include <dlfcn.h>

#include <atomic>
#include <optional>
#include <string>
#include <unordered_map>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace fused_norm {

using at::Tensor;

// `Call` in op/call.mojo, which says what each field is.
struct Call {
  int64_t M;
  double eps;
  int64_t context, threads, in_graph, may_keep, accumulate;
  void *x, *y, *mean, *rstd, *z, *dy, *dz, *dx, *dgamma, *dbeta, *dweight, *dbias;
  int64_t normalization;
  double weight_offset;
  int64_t has_statistics;
  void *residual, *sum, *dsum;
  int64_t groups;
  void *scale, *shift, *dscale, *dshift;
  int64_t activation;
  void *h, *a, *da, *dh;
  void* workspace;
  int64_t way, workspace_bytes;
  int64_t K, N;
  void *gamma, *beta, *weight, *bias, *up, *up_bias;
  int64_t norm_is_float32, narrow;
  void *fold_weight, *fold_sums, *fold_constants;
};

// The ways of op/norm_linear/plan.mojo.
enum Way : int64_t { DECLINED, FUSED, KEPT_FOLD, NEW_FOLD, AROUND_PRODUCTS };

// What stands for the address of a result that a plan is asked about.
inline void* const WANTED = reinterpret_cast<void*>(1);

using Function = int64_t (*)(Call*);

// The functions of an extension, null where there is none.
struct Kernels {
  Function plan_forward = nullptr, forward = nullptr, plan_backward = nullptr, backward = nullptr;

  // Those of a file that Python has loaded.
  static const Kernels& of(const std::string& path) {
    static std::unordered_map<std::string, Kernels> known;
    const auto found = known.find(path);
    if (found != known.end()) return found->second;
    Kernels kernels;
    if (void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
      const auto function = [&](const char* name) {
        return reinterpret_cast<Function>(dlsym(library, name));
      };
      kernels = {function("norm_linear_plan_forward"), function("norm_linear_forward"),
                 function("norm_linear_plan_backward"), function("norm_linear_backward")};
    }
    return known.emplace(path, kernels).first->second;
  }
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
  const Tensor &x, &gamma, &beta, &weight, &bias, &mean, &rstd;

  const Tensor& norm() const {
    return gamma.defined() ? gamma : beta;
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

// A call on these inputs; nothing where a tensor is not as the kernels need it.
inline std::optional<Call> call_on(
    const Inputs& inputs, const Plain& is_plain, int64_t context, double eps) {
  const auto& [x, gamma, beta, weight, bias, mean, rstd] = inputs;
  if (weight.dim() != 2) return std::nullopt;
  const int64_t N = weight.size(0), K = weight.size(1), M = mean.numel();
  const auto dtype = x.scalar_type(), wide = statistics_dtype(dtype);
  const auto& norm = inputs.norm();
  const auto norm_dtype = norm.defined() ? norm.scalar_type() : dtype;
  if (!is_plain(x, M * K, dtype) || !is_plain(weight, N * K, dtype) ||
      !is_plain.may_be(bias, N, dtype) || !is_plain(mean, M, wide) || !is_plain(rstd, M, wide) ||
      !is_plain.may_be(gamma, K, norm_dtype) || !is_plain.may_be(beta, K, norm_dtype) ||
      (norm_dtype != dtype && norm_dtype != at::kFloat)) {
    return std::nullopt;
  }
  Call call{};
  call.M = M;
  call.eps = eps;
  call.context = context;
  call.threads = forked ? 1 : at::get_num_threads();
  call.x = address(x);
  call.mean = address(mean);
  call.rstd = address(rstd);
  call.K = K;
  call.N = N;
  call.gamma = address(gamma);
  call.beta = address(beta);
  call.weight = address(weight);
  call.bias = address(bias);
  call.norm_is_float32 = norm_dtype != dtype;
  return call;
}

// Allocates the workspace that a plan asks for.
inline Tensor workspace_of(Call& call, const Tensor& x) {
  Tensor workspace;
  if (call.workspace_bytes > 0) {
    workspace = at::empty({call.workspace_bytes}, x.options().dtype(at::kByte));
  }
  call.workspace = address(workspace);
  return workspace;
}

}  // namespace fused_norm
