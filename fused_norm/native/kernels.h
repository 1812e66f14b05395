// The kernels of a dtype on a device's stream, and how they are run.

#pragma once

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_ops.h>

#include "call.h"

namespace fused_norm {

// Set in a child: OpenMP's workers do not survive a fork, and waiting for them would hang.
inline std::atomic<bool> forked{false};

// The functions of a file that Python has loaded; null where there is none.
class Library {
 public:
  explicit Library(const std::string& path)
      : handle_(path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)) {}

  Function operator()(const char* name) const {
    return handle_ ? reinterpret_cast<Function>(dlsym(handle_, name)) : nullptr;
  }

 private:
  void* handle_;
};

// A norm and a product in one: an extension norm_linear_*.
struct Product {
  Function plan_forward = nullptr, forward = nullptr, plan_backward = nullptr, backward = nullptr,
           plan_linear_add = nullptr, linear_add = nullptr, plan_products = nullptr,
           products = nullptr, plan_input_gradients = nullptr, input_gradients = nullptr,
           plan_passed_rows = nullptr, passed_rows = nullptr, plan_weight_gradient = nullptr,
           weight_gradient = nullptr;
  // The way that plans are asked for; 0 leaves it to them.
  int64_t context = 0, way = 0;

  Product() = default;
  Product(const Library& library, int64_t context, int64_t way)
      : plan_forward(library("norm_linear_plan_forward")),
        forward(library("norm_linear_forward")),
        plan_backward(library("norm_linear_plan_backward")),
        backward(library("norm_linear_backward")),
        plan_linear_add(library("norm_linear_plan_linear_add")),
        linear_add(library("norm_linear_linear_add")),
        plan_products(library("norm_linear_plan_products")),
        products(library("norm_linear_products")),
        plan_input_gradients(library("norm_linear_plan_input_gradients")),
        input_gradients(library("norm_linear_input_gradients")),
        plan_passed_rows(library("norm_linear_plan_passed_rows")),
        passed_rows(library("norm_linear_passed_rows")),
        plan_weight_gradient(library("norm_linear_plan_weight_gradient")),
        weight_gradient(library("norm_linear_weight_gradient")),
        context(context),
        way(way) {}
};

// Passes over rows around products: an extension passes_*.
struct Passes {
  Function plan_normalize = nullptr, normalize = nullptr, plan_normalize_backward = nullptr,
           normalize_backward = nullptr, activate = nullptr, plan_activate_backward = nullptr,
           activate_backward = nullptr;
  int64_t context = 0;

  Passes() = default;
  Passes(const Library& library, int64_t context)
      : plan_normalize(library("passes_plan_normalize")),
        normalize(library("passes_normalize")),
        plan_normalize_backward(library("passes_plan_normalize_backward")),
        normalize_backward(library("passes_normalize_backward")),
        activate(library("passes_activate")),
        plan_activate_backward(library("passes_plan_activate_backward")),
        activate_backward(library("passes_activate_backward")),
        context(context) {}
};

struct Kernels {
  Product product;
  Passes passes;
};

inline int64_t threads() {
  return forked ? 1 : at::get_num_threads();
}

// A tensor beside another, as `at::empty` gives it, on a CPU or a CUDA device. Nothing watches here,
// so that the dispatcher's first stops are passed by.
inline Tensor empty(at::IntArrayRef shape, const Tensor& like, at::ScalarType dtype) {
  const c10::DispatchKeySet backend(
      like.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  return at::_ops::empty_memory_format::redispatch(
      backend, c10::fromIntArrayRefSlow(shape), dtype, at::kStrided, like.device(), false,
      std::nullopt);
}

inline Tensor empty(at::IntArrayRef shape, const Tensor& like) {
  return empty(shape, like, like.scalar_type());
}

// Gives a call the workspace that its plan asks for. On a CPU it is that of the thread's calls
// before, if it is large enough: fresh memory would cost a page fault for every 4 KiB.
inline Tensor workspace_of(Call& call, const Tensor& like) {
  thread_local Tensor kept;
  Tensor workspace;
  if (call.workspace_bytes > 0) {
    const bool may_keep = like.is_cpu() && call.workspace_bytes <= MOST_KEPT;
    if (may_keep && kept.defined() && kept.numel() >= call.workspace_bytes) {
      workspace = kept;
    } else {
      workspace = empty({call.workspace_bytes}, like, at::kByte);
      if (may_keep) kept = workspace;
    }
  }
  call.workspace = address(workspace);
  return workspace;
}

// Runs kernels on a CPU, or queues them on a GPU, where threads take turns.
inline void launch(Function function, Call& call, const Tensor& like) {
  static std::mutex launching;
  std::unique_lock<std::mutex> lock(launching, std::defer_lock);
  if (!like.is_cpu()) lock.lock();
  TORCH_CHECK(function(&call) == 0, "fused_norm: a kernel could not be launched");
}

// Runs a pass that has a workspace.
inline void run(Function plan, Function function, Call& call, const Tensor& like) {
  TORCH_CHECK(plan(&call) == 0, "fused_norm: a pass could not be planned");
  const auto workspace = workspace_of(call, like);
  launch(function, call, like);
}

}  // namespace fused_norm
