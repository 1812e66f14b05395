// The PyTorch operations that a call needs: the C functions that models exported by AOTInductor call,
// below autograd, autocast and the dispatcher. Those of CUDA are looked up when needed.

#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include "tensor.h"

namespace fused_norm {

// A function of libtorch_cuda.
template <class Function>
Function of_cuda(const char* name) {
  static void* const library = [] {
    void* found = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return found ? found : dlopen("libtorch_hip.so", RTLD_NOLOAD | RTLD_LAZY);
  }();
  void* found = library ? dlsym(library, name) : nullptr;
  if (!found) throw std::runtime_error(std::string("fused_norm: PyTorch has no ") + name);
  return reinterpret_cast<Function>(found);
}

inline Tensor empty_strided(
    Sizes sizes, Sizes strides, const Tensor& like, DType dtype, bool has_values = true) {
  static const int32_t meta = aoti_torch_device_type_meta();
  AtenTensorHandle made = nullptr;
  const auto error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
      has_values ? like.device_type() : meta, has_values ? like.device() : 0, &made);
  // Sizes come from an existing tensor, so that nothing else can be wrong.
  check(error, "empty_strided: out of memory");
  return Tensor::owned(made);
}

// A dense tensor on another tensor's device.
inline Tensor empty(Sizes sizes, const Tensor& like, DType dtype) {
  return empty_strided(sizes, dense_strides(sizes), like, dtype);
}

inline Tensor empty(Sizes sizes, const Tensor& like) {
  return empty(sizes, like, like.dtype());
}

inline Tensor empty_like(const Tensor& like) {
  return empty(like.sizes(), like);
}

// A tensor like another, with rows of another length.
inline Tensor empty_rows(const Tensor& x, int64_t last) {
  return empty(Shape(x.sizes(), last), x);
}

inline void copy(const Tensor& to, const Tensor& from) {
  check(aoti_torch_copy_(to.get(), from.get(), 0), "copy_");
}

inline Tensor cloned(const Tensor& tensor) {
  const auto made = empty_like(tensor);
  copy(made, tensor);
  return made;
}

// The same values in dense memory.
inline Tensor dense(const Tensor& tensor) {
  return !tensor.defined() || tensor.is_contiguous() ? tensor : cloned(tensor);
}

inline Tensor zeros(Sizes sizes, const Tensor& like, DType dtype) {
  const auto made = empty(sizes, like, dtype);
  check(aoti_torch_zero_(made.get()), "zero_");
  return made;
}

// out = a b
inline void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
  using Mm = decltype(&aoti_torch_cpu_mm_out);
  if (out.is_cpu()) return check(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()), "mm");
  static const auto cuda = of_cuda<Mm>("aoti_torch_cuda_mm_out");
  check(cuda(out.get(), a.get(), b.get()), "mm");
}

// out = self + a b; self may be a row that is added to each row.
inline void addmm(const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b) {
  using Addmm = decltype(&aoti_torch_cpu_addmm_out);
  if (out.is_cpu()) {
    return check(
        aoti_torch_cpu_addmm_out(out.get(), self.get(), a.get(), b.get(), 1.0, 1.0), "addmm");
  }
  static const auto cuda = of_cuda<Addmm>("aoti_torch_cuda_addmm_out");
  check(cuda(out.get(), self.get(), a.get(), b.get(), 1.0, 1.0), "addmm");
}

inline StableIValue argument(const Tensor& tensor) {
  return torch::stable::detail::from(tensor.released());
}

// a b, rounded once to a dtype wider than that of a and b.
inline Tensor widened_product(const Tensor& a, const Tensor& b, DType dtype) {
  if (a.is_cpu()) {
    const auto narrow = empty(Shape{a.size(0), b.size(1)}, a), wide = empty(narrow.sizes(), a, dtype);
    mm(narrow, a, b);
    copy(wide, narrow);
    return wide;
  }
  std::array<StableIValue, 3> stack{
      argument(a), argument(b),
      torch::stable::detail::from(static_cast<torch::headeronly::ScalarType>(dtype))};
  check(torch_call_dispatcher("aten::mm", "dtype", stack.data(), TORCH_ABI_VERSION), "mm");
  return Tensor::owned(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

// A dense tensor, in the layout of PyTorch's sum of tensors of its shape.
inline Tensor laid_as_sum(const Tensor& tensor, std::initializer_list<Tensor> summands) {
  bool are_dense = true;
  for (const auto& v : summands) are_dense = are_dense && (!v.defined() || v.is_contiguous());
  if (are_dense) return tensor;
  // Run on tensors without values, an elementwise op computes only a layout; this one takes only tensors.
  Tensor total;
  for (const auto& v : summands) {
    if (!v.defined()) continue;
    const auto bare = empty_strided(v.sizes(), v.strides(), v, v.dtype(), false);
    if (!total.defined()) {
      total = bare;
      continue;
    }
    std::array<StableIValue, 2> stack{argument(total), argument(bare)};
    check(torch_call_dispatcher("aten::mul", "Tensor", stack.data(), TORCH_ABI_VERSION), "mul");
    total = Tensor::owned(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  }
  if (are_equal(total.strides(), tensor.strides())) return tensor;
  const auto laid = empty_strided(total.sizes(), total.strides(), tensor, tensor.dtype());
  copy(laid, tensor);
  return laid;
}

// Products use the current device's cuBLAS handle, and allocations its memory.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& of) {
    if (!of.is_cpu()) check(aoti_torch_create_device_guard(of.device(), &guard_), "a device guard");
  }
  ~OnDevice() {
    if (guard_) aoti_torch_delete_device_guard(guard_);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

// PyTorch's products copy a bias through the dispatcher, where autograd would record it.
class NoGrad {
 public:
  NoGrad() : before_(aoti_torch_grad_mode_is_enabled()) {
    if (before_) aoti_torch_grad_mode_set_enabled(false);
  }
  ~NoGrad() {
    if (before_) aoti_torch_grad_mode_set_enabled(true);
  }
  NoGrad(const NoGrad&) = delete;

 private:
  bool before_;
};

}  // namespace fused_norm
