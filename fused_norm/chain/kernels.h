// The kernels of a dtype on a device's stream, and how they are run.

#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <deque>
#include <limits>
#include <mutex>

#include "call.h"
#include "chain.h"
#include "operations.h"

namespace fused_norm {

inline Python python;

inline bool has_mean(const Spec& spec) {
  return python.with_mean >> spec.normalization & 1;
}

// Thrown if a call is left to Python or PyTorch; an error if there is no such fallback.
struct Declined : std::runtime_error {
  Declined() : std::runtime_error("fused_norm: no kernels are at hand for such tensors") {}
};

// The functions of a file that Python has loaded; null if there is none.
class Library {
 public:
  explicit Library(const char* path)
      : handle_(*path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr) {}

  template <class Kernel = Function>
  Kernel get(const char* name) const {
    return handle_ ? reinterpret_cast<Kernel>(dlsym(handle_, name)) : nullptr;
  }
  Function operator()(const char* name) const { return get(name); }

 private:
  void* handle_;
};

// Norm and product in one call, and products alone: an extension norm_linear_*.
struct Product {
  Product(const Library& library, const Answer& answer)
      : library(library), context(answer.product_context), strategy(answer.strategy),
        kept_strategy(answer.kept_strategy), costs(answer.costs) {}

  Library library;
  const Function plan_forward = library("norm_linear_plan_forward");
  const Function forward = library("norm_linear_forward");
  const Function plan_backward = library("norm_linear_plan_backward");
  const Function backward = library("norm_linear_backward");
  const Function plan_linear = library("norm_linear_plan_linear");
  const Function linear = library("norm_linear_linear");
  const Function plan_input_gradient = library("norm_linear_plan_input_gradient");
  const Function input_gradient = library("norm_linear_input_gradient");
  const Function plan_weight_gradient = library("norm_linear_plan_weight_gradient");
  const Function weight_gradient = library("norm_linear_weight_gradient");
  const Function plan_products = library("norm_linear_plan_products");
  const Function products = library("norm_linear_products");
  const Function plan_input_gradients = library("norm_linear_plan_input_gradients");
  const Function input_gradients = library("norm_linear_input_gradients");
  const Function plan_passed_rows = library("norm_linear_plan_passed_rows");
  const Function passed_rows = library("norm_linear_passed_rows");
  const Function fold = library("norm_linear_fold");
  int64_t context, strategy, kept_strategy;
  const double* costs;
};

// Passes over rows around products: an extension passes_*.
struct Passes {
  Passes(const Library& library, int64_t context) : library(library), context(context) {}

  Library library;
  const Function plan_normalize = library("passes_plan_normalize");
  const Function normalize = library("passes_normalize");
  const Function plan_normalize_backward = library("passes_plan_normalize_backward");
  const Function normalize_backward = library("passes_normalize_backward");
  const Function activate = library("passes_activate");
  const Function plan_activate_backward = library("passes_plan_activate_backward");
  const Function activate_backward = library("passes_activate_backward");
  int64_t context;
};

// Quantization of bfloat16 and products in 8 bits: the extension fp8_sm90.
struct EightBits {
  EightBits(const Library& library, int64_t context) : library(library), context(context) {}

  Library library;
  const Function quantize = library("fp8_quantize");
  const Function maxima = library("fp8_maxima");
  const Function quantize_by_maxima = library("fp8_quantize_by_maxima");
  const Function normalize = library("fp8_normalize");
  const Function linear = library("fp8_linear");
  const Function linears = library("fp8_linears");
  int64_t context;
};

inline void* current_stream(int32_t device) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const auto get = of_cuda<Get>("aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  check(get(device, &stream), "the current stream");
  return stream;
}

// Whether a CUDA graph captures the work queued on a stream.
inline bool is_captured(void* stream) {
  using Ask = int (*)(void*, int*);
  static const auto ask = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    return driver ? reinterpret_cast<Ask>(dlsym(driver, "cuStreamIsCapturing")) : nullptr;
  }();
  int status = 0;
  return ask && ask(stream, &status) == 0 && status == 1;
}

// Initializes PyTorch's products in this thread on a GPU, once: a captured graph may use them later,
// and they cannot be initialized during a capture.
inline void prepare_products(int32_t device) {
  thread_local std::bitset<std::numeric_limits<int8_t>::max() + 1> ready;
  if (!ready[device]) ready[device] = python.prepare(device) != 0;
}

// The kernels of a dtype; those of row ops and of 8 bits are separate.
struct Loaded {
  Product product;
  Passes passes;
  RowFunction rows;
  EightBits eight_bits;
};

// Returns them; Python chooses them once for a device, a stream and a norm.
inline const Loaded& loaded(const Question& question) {
  struct Known {
    Question question;
    int told;
    Loaded loaded;
  };
  static std::mutex mutex;
  static std::deque<Known> known;
  const std::lock_guard lock(mutex);
  for (const auto& [of, told, found] : known) {
    if (told == python.told && std::memcmp(&of, &question, sizeof of) == 0) return found;
  }
  // A thread that waits here has released the GIL, which Python takes to answer.
  Answer answer{};
  const char* error = nullptr;
  switch (python.find(&question, &answer, &error)) {
    case 0: break;
    case 1: throw Declined();
    default: throw std::runtime_error(error ? error : "fused_norm: no kernels were found");
  }
  const Library product(answer.product), passes(answer.passes);
  const Loaded found{
      Product(product, answer), Passes(passes, answer.passes_context),
      passes.get<RowFunction>("rows_run"), EightBits(product, answer.product_context)};
  return known.emplace_back(Known{question, python.told, found}).loaded;
}

// The kernels of a call: for its products, for passes over them, and for passes over the rows of x,
// whose dtype may be wider under autocast.
struct Kernels {
  const Product& product;
  const Passes& passes;
  const Passes& norm_passes;
  bool is_captured;

  static Kernels find(
      const Tensor& x, DType product, int64_t normalization, bool invariant, Conditions given) {
    Question question{};
    question.is_cpu = x.is_cpu();
    question.normalization = normalization;
    question.invariant = invariant;
    bool captured = false;
    if (!x.is_cpu()) {
      question.device = x.device();
      prepare_products(question.device);
      if (given.is_alone < 0 || given.may_use_tf32 < 0) {
        const int found = python.conditions(question.device);
        given = {found & 1, found >> 1};
      }
      void* const stream = current_stream(question.device);
      captured = fused_norm::is_captured(stream);
      question.stream = reinterpret_cast<int64_t>(stream);
      question.is_alone = given.is_alone;
    }
    const auto of = [&](DType dtype) -> const Loaded& {
      question.dtype = dtype;
      question.may_use_tf32 = !x.is_cpu() && dtype == FLOAT32 && given.may_use_tf32;
      return loaded(question);
    };
    const Loaded& of_product = of(product);
    const Loaded& of_norm = product == x.dtype() ? of_product : of(x.dtype());
    return {of_product.product, of_product.passes, of_norm.passes, captured};
  }
};

// Set in a child: OpenMP's workers do not survive a fork, and waiting for them would hang.
inline std::atomic<bool> forked{false};

inline int64_t threads() {
  uint32_t count = 1;
  if (!forked) check(torch_get_num_threads(&count), "the number of threads");
  return count;
}

// Gives a call the workspace that its plan asks for. On a CPU, the thread reuses the one of its
// earlier calls if it is large enough: fresh memory would cost a page fault for every 4 KiB.
inline Tensor workspace_of(Call& call, const Tensor& like) {
  thread_local Tensor kept;
  Tensor workspace;
  if (call.workspace_bytes > 0) {
    const bool may_keep = like.is_cpu() && call.workspace_bytes <= MOST_KEPT;
    if (may_keep && kept.defined() && kept.numel() >= call.workspace_bytes) {
      workspace = kept;
    } else {
      workspace = empty(Shape{call.workspace_bytes}, like, BYTES);
      if (may_keep) kept = workspace;
    }
  }
  call.workspace = address(workspace);
  return workspace;
}

inline std::mutex launching;

// Runs kernels on a CPU, or queues them on a GPU, one thread at a time.
template <class Run>
void launch(Run run, const Tensor& like) {
  std::unique_lock<std::mutex> lock(launching, std::defer_lock);
  if (!like.is_cpu()) lock.lock();
  if (run() != 0) throw std::runtime_error("fused_norm: a kernel could not be launched");
}

inline void launch(Function function, Call& call, const Tensor& like) {
  launch([&] { return function(&call); }, like);
}

// Runs a pass that has a workspace.
inline void run(Function plan, Function function, Call& call, const Tensor& like) {
  if (plan(&call) != 0) throw std::runtime_error("fused_norm: a pass could not be planned");
  const auto workspace = workspace_of(call, like);
  launch(function, call, like);
}

}  // namespace fused_norm
