// PyTorch's tensors and the few of its operations that a call needs, by the stable ABI alone: one
// binary serves every PyTorch from 2.11 on.
//
// Operations are the C functions that models exported by AOTInductor call, which run below autograd,
// autocast and the dispatcher. What a PyTorch without CUDA does not have is looked up when needed.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/core/ScalarType.h>

namespace fused_norm {

// PyTorch tells what went wrong from 2.13 on; before, it logs that.
[[noreturn]] inline void fail(const char* what) {
  using What = const char* (*)();
  static const auto said =
      reinterpret_cast<What>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  throw std::runtime_error(said ? said() : std::string("fused_norm: PyTorch failed in ") + what);
}

inline void check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) fail(what);
}

using DType = int32_t;
constexpr DType FLOAT32 = static_cast<DType>(torch::headeronly::ScalarType::Float);
constexpr DType FLOAT64 = static_cast<DType>(torch::headeronly::ScalarType::Double);
constexpr DType FLOAT16 = static_cast<DType>(torch::headeronly::ScalarType::Half);
constexpr DType BFLOAT16 = static_cast<DType>(torch::headeronly::ScalarType::BFloat16);
constexpr DType BYTES = static_cast<DType>(torch::headeronly::ScalarType::Byte);

inline bool is_low_precision(DType dtype) {
  return dtype == BFLOAT16 || dtype == FLOAT16;
}

inline DType statistics_dtype(DType dtype) {
  return dtype == FLOAT64 ? FLOAT64 : FLOAT32;
}

using Sizes = std::span<const int64_t>;

// The sizes of a tensor to be made.
class Shape {
 public:
  Shape(std::initializer_list<int64_t> sizes) : Shape(Sizes(sizes.begin(), sizes.size())) {}
  explicit Shape(Sizes sizes) : count_(sizes.size()) {
    if (count_ > sizes_.size()) throw std::runtime_error("fused_norm: too many dimensions");
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  }
  // The same with another last size.
  Shape(Sizes sizes, int64_t last) : Shape(sizes) {
    sizes_[count_ - 1] = last;
  }
  void set(size_t place, int64_t size) { sizes_[place] = size; }
  operator Sizes() const {
    return {sizes_.data(), count_};
  }

 private:
  std::array<int64_t, 64> sizes_;
  size_t count_;
};

inline Shape dense_strides(Sizes sizes) {
  Shape strides(sizes);
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides.set(i, step);
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

inline bool are_equal(Sizes a, Sizes b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// A tensor, or none. What kernels ask of it is asked once.
class Tensor {
 public:
  Tensor() = default;

  // One that somebody else keeps meanwhile; null for none.
  static Tensor borrowed(AtenTensorHandle handle) {
    return handle ? Tensor(handle) : Tensor();
  }
  static Tensor owned(AtenTensorHandle handle) {
    Tensor tensor(handle);
    tensor.owner_.reset(handle, [](AtenTensorHandle h) { aoti_torch_delete_tensor_object(h); });
    return tensor;
  }

  bool defined() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  // A handle for whoever takes a result over; null for none.
  AtenTensorHandle released() const {
    AtenTensorHandle made = nullptr;
    if (handle_) check(aoti_torch_new_tensor_handle(handle_, &made), "a new handle");
    return made;
  }

  int64_t dim() const { return dim_; }
  Sizes sizes() const { return {sizes_, static_cast<size_t>(dim_)}; }
  int64_t size(int64_t i) const { return sizes_[i < 0 ? i + dim_ : i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes()) count *= size;
    return count;
  }
  Sizes strides() const {
    int64_t* strides = nullptr;
    check(aoti_torch_get_strides(handle_, &strides), "strides");
    return {strides, static_cast<size_t>(dim_)};
  }
  DType dtype() const { return dtype_; }
  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_)); }
  bool is_contiguous() const { return is_contiguous_; }
  void* data() const { return data_; }
  bool is_same(const Tensor& other) const { return handle_ == other.handle_; }
  int32_t device_type() const { return device_type_; }
  int32_t device() const {
    int32_t index = 0;
    check(aoti_torch_get_device_index(handle_, &index), "device");
    return index;
  }
  bool is_cpu() const {
    static const int32_t cpu = aoti_torch_device_type_cpu();
    return device_type_ == cpu;
  }

  // The same memory with other sizes and strides; `skipped` elements are left out before.
  Tensor viewed(Sizes sizes, Sizes strides, int64_t skipped = 0) const {
    AtenTensorHandle made = nullptr;
    check(
        aoti_torch__reinterpret_tensor(
            handle_, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), skipped,
            &made),
        "a view");
    return owned(made);
  }
  // Dense rows.
  Tensor rows() const {
    if (dim_ == 2) return *this;
    int64_t M = 1;
    for (const int64_t size : sizes().first(static_cast<size_t>(dim_) - 1)) M *= size;
    return viewed(Shape{M, size(-1)}, Shape{std::max<int64_t>(size(-1), 1), 1});
  }
  Tensor transposed() const {
    const auto before = strides();
    return viewed(Shape{size(1), size(0)}, Shape{before[1], before[0]});
  }
  // Neighboring columns of a matrix, or elements of a vector.
  Tensor narrowed(int64_t first, int64_t count) const {
    return viewed(Shape(sizes(), count), strides(), first * strides()[dim_ - 1]);
  }

 private:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    int64_t* sizes = nullptr;
    check(aoti_torch_get_sizes(handle, &sizes), "sizes");
    sizes_ = sizes;
    check(aoti_torch_get_dim(handle, &dim_), "dim");
    check(aoti_torch_get_dtype(handle, &dtype_), "dtype");
    check(aoti_torch_get_device_type(handle, &device_type_), "device");
    check(aoti_torch_is_contiguous(handle, &is_contiguous_), "is_contiguous");
    check(aoti_torch_get_data_ptr(handle, &data_), "data_ptr");
  }

  AtenTensorHandle handle_ = nullptr;
  std::shared_ptr<AtenTensorOpaque> owner_;
  const int64_t* sizes_ = nullptr;
  int64_t dim_ = 0;
  void* data_ = nullptr;
  DType dtype_ = 0;
  int32_t device_type_ = 0;
  bool is_contiguous_ = false;
};

using Tensors = std::vector<Tensor>;

inline void* address(const Tensor& tensor) {
  return tensor.data();
}

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
  // Nothing else is wrong with sizes that a tensor has.
  check(error, "empty_strided: out of memory");
  return Tensor::owned(made);
}

// Dense memory beside another tensor's.
inline Tensor empty(Sizes sizes, const Tensor& like, DType dtype) {
  return empty_strided(sizes, dense_strides(sizes), like, dtype);
}

inline Tensor empty(Sizes sizes, const Tensor& like) {
  return empty(sizes, like, like.dtype());
}

inline Tensor empty_like(const Tensor& like) {
  return empty(like.sizes(), like);
}

// A tensor like another, whose rows have another length.
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

inline Tensor zeros(Sizes sizes, const Tensor& like) {
  const auto made = empty(sizes, like);
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

// out = self + a b; self may be a row that is added to all.
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

// a b, rounded once to a dtype that is wider than theirs.
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

// A dense tensor, laid out as PyTorch lays out the sum of tensors of its shape.
inline Tensor laid_as_sum(const Tensor& tensor, std::initializer_list<Tensor> summands) {
  bool are_dense = true;
  for (const auto& v : summands) are_dense = are_dense && (!v.defined() || v.is_contiguous());
  if (are_dense) return tensor;
  // Without values, an op of elements gives a layout alone; this one takes nothing but tensors.
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

// Products take the current device's cuBLAS handle, and allocations its memory.
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

// PyTorch's products copy a bias by the dispatcher, where autograd would record it.
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
