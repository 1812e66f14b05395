// PyTorch's tensors through the stable ABI alone: one binary serves every PyTorch from 2.11 on.

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
#include <torch/headeronly/core/ScalarType.h>

namespace fused_norm {

// PyTorch returns error messages from 2.13 on; before, it only logs them.
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
constexpr DType E4M3 = static_cast<DType>(torch::headeronly::ScalarType::Float8_e4m3fn);
constexpr DType E5M2 = static_cast<DType>(torch::headeronly::ScalarType::Float8_e5m2);
constexpr DType BYTES = static_cast<DType>(torch::headeronly::ScalarType::Byte);

inline bool is_low_precision(DType dtype) {
  return dtype == BFLOAT16 || dtype == FLOAT16;
}

inline DType statistics_dtype(DType dtype) {
  return dtype == FLOAT64 ? FLOAT64 : FLOAT32;
}

using Sizes = std::span<const int64_t>;

// The sizes of a tensor to be allocated.
class Shape {
 public:
  Shape(std::initializer_list<int64_t> sizes) : Shape(Sizes(sizes.begin(), sizes.size())) {}
  explicit Shape(Sizes sizes) : count_(sizes.size()) {
    if (count_ > sizes_.size()) throw std::runtime_error("fused_norm: too many dimensions");
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  }
  // The same sizes with another last one.
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

// A tensor, or none. What kernels ask about it is asked once.
class Tensor {
 public:
  Tensor() = default;

  // A tensor that the caller owns; null for none.
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
  // A handle that the caller takes over; null for none.
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

  // The same memory with other sizes and strides, starting `skipped` elements later.
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
  // Consecutive columns of a matrix, or elements of a vector.
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

}  // namespace fused_norm
