// The norm of a trained eps, and its backward as a node of PyTorch's graph.

#pragma once

#include <deque>
#include <mutex>

#include <pthread.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "nodes.h"

namespace fused_norm {

// `RowCall` in op/rows/op.mojo, which says what each field is.
struct RowCall {
  int64_t M, K, context, threads, accumulate;
  void* parameter;
  int64_t parameter_is_float32;
  void *parameter_gradient, *workspace, *outputs[2], *inputs[3];
};

// Set in a child: OpenMP's workers do not survive a fork, and waiting for them would hang.
inline std::atomic<bool> forked{false};

inline int64_t threads() {
  return forked ? 1 : at::get_num_threads();
}

inline void* address(const Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

inline at::ScalarType statistics_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// row_kernels(x) returns the forward, the backward and the context of their calls;
// row_backward(grad_output, x, o, wanted) is what is left to Python.
inline PyObject *python_row_kernels = nullptr, *python_row_backward = nullptr;

// Python's functions of an extension's kernels, for a dtype and a stream.
struct RowKernels {
  PyObject *forward = nullptr, *backward = nullptr;
  int64_t context = 0;

  static const RowKernels& find(const Tensor& x) {
    using Key = std::pair<at::ScalarType, std::optional<c10::Stream>>;
    const Key key{x.scalar_type(), current_stream(x.device())};
    static std::deque<std::pair<Key, RowKernels>> known;
    for (const auto& [of, kernels] : known) {
      if (of == key) return kernels;
    }
    const auto found = py::checked(PyObject_CallFunction(
        python_row_kernels, "N", THPVariable_Wrap(x)));
    RowKernels kernels;
    long long context = 0;
    if (!PyArg_ParseTuple(found.ptr(), "OOL", &kernels.forward, &kernels.backward, &context)) {
      py::throw_error();
    }
    Py_IncRef(kernels.forward);
    Py_IncRef(kernels.backward);
    kernels.context = context;
    return known.emplace_back(key, kernels).second;
  }

  // With Python's lock, which the kernels release where that pays.
  static void run(PyObject* function, RowCall& call) {
    py::checked(PyObject_CallFunction(
        function, "L", static_cast<long long>(reinterpret_cast<intptr_t>(&call))));
  }
};

inline RowCall row_call(const Tensor& x, const Tensor& o, int64_t context) {
  RowCall call{};
  call.K = x.size(-1);
  call.M = x.numel() / call.K;
  call.context = context;
  call.threads = threads();
  call.parameter = o.data_ptr();
  call.parameter_is_float32 = o.scalar_type() == at::kFloat;
  return call;
}

// Whether kernels can take x as it stands, as rows, and o as a scalar beside them.
inline bool are_rows_with_scalar(const Tensor& x, const Tensor& o) {
  const auto dtype = x.scalar_type(), own = o.scalar_type();
  const bool is_narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  const bool has_kernel = (is_narrow || dtype == at::kFloat || (dtype == at::kDouble && x.is_cpu())) &&
      (own == dtype || (is_narrow && own == at::kFloat));
  const Tensor both[] = {x, o};
  return has_kernel && (x.is_cpu() || x.is_cuda()) && are_ordinary(both, x) && x.dim() &&
      x.numel() && x.size(-1) <= 2147483647 && x.is_contiguous() && x.data_ptr() &&
      o.is_contiguous() && o.numel() == 1;
}

class TrainableEpsLayerNormBackward : public torch::autograd::Node {
 public:
  TrainableEpsLayerNormBackward(const Tensor& x, const Tensor& o, const RowKernels& kernels)
      : x_(x, false), o_(o, false), kernels_(kernels), stream_(current_stream(x.device())) {
    set_next_edges(torch::autograd::collect_next_edges(x, o));
  }

  std::string name() const override {
    return "TrainableEpsLayerNormBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    o_.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    if (none_defined(gradients)) return variable_list(2);
    Tensor x, o;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      x = x_.unpack();
      o = o_.unpack();
    }
    variable_list results(2);
    if (!compute(gradients[0], x, o, results)) call_python(gradients[0], x, o, results);
    return results;
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(x_, /*is_output=*/false);
    args.collect(o_, /*is_output=*/false);
  }

  variable_list apply_with_saved(
      const variable_list& gradients, torch::autograd::SwapSavedVariables& swap) override {
    swap.before(x_);
    swap.before(o_);
    variable_list results(2);
    if (gradients[0].defined()) call_python(gradients[0], x_.unpack(), o_.unpack(), results);
    swap.after(x_);
    swap.after(o_);
    return results;
  }

 private:
  // Runs the kernel; false where Python has to.
  bool compute(
      const Tensor& given, const Tensor& x, const Tensor& o, variable_list& results) const {
    if (at::GradMode::is_enabled() || is_watched() || !are_rows_with_scalar(x, o) ||
        !are_ordinary(given, x) || given.sizes() != x.sizes() ||
        given.scalar_type() != x.scalar_type() || current_stream(x.device()) != stream_) {
      return false;
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto dy = given.contiguous();
    auto call = row_call(x, o, kernels_.context);
    Tensor shares;
    if (task_should_compute_output(0)) results[0] = at::empty(x.sizes(), x.options());
    if (task_should_compute_output(1)) {
      results[1] = at::empty(o.sizes(), o.options());
      shares = at::empty({call.M}, x.options().dtype(statistics_dtype(x.scalar_type())));
    }
    call.inputs[0] = dy.data_ptr();
    call.inputs[1] = x.data_ptr();
    call.outputs[0] = address(results[0]);
    call.parameter_gradient = address(results[1]);
    call.workspace = address(shares);
    py::gil_scoped_acquire lock;
    kernels_.run(kernels_.backward, call);
    return true;
  }

  void call_python(
      const Tensor& dy, const Tensor& x, const Tensor& o, variable_list& results) const {
    py::gil_scoped_acquire lock;
    const auto wanted =
        py::make_tuple(task_should_compute_output(0), task_should_compute_output(1));
    const auto given = wrap(dy), rows = wrap(x), scalar = wrap(o);
    const auto found = py::checked(PyObject_CallFunctionObjArgs(
        python_row_backward, given.ptr(), rows.ptr(), scalar.ptr(), wanted.ptr(), nullptr));
    const auto tensors = unwrapped(found, 2);
    results.assign(tensors.begin(), tensors.end());
  }

  SavedVariable x_, o_;
  RowKernels kernels_;
  std::optional<c10::Stream> stream_;
  std::mutex mutex_;
};

// trainable_eps(x, o): the norm of a trained eps. None where that is left to Python.
inline PyObject* trainable_eps(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "trainable_eps takes 2 arguments");
  if (!THPVariable_CheckExact(arguments[0]) || !THPVariable_CheckExact(arguments[1])) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(arguments[0]), &o = THPVariable_Unpack(arguments[1]);
  if (!are_rows_with_scalar(x, o) || is_watched()) Py_RETURN_NONE;
  const bool keeps = at::GradMode::is_enabled() && (x.requires_grad() || o.requires_grad());
  const auto& kernels = RowKernels::find(x);
  Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::empty(x.sizes(), x.options());
    auto call = row_call(x, o, kernels.context);
    call.inputs[0] = x.data_ptr();
    call.outputs[0] = y.data_ptr();
    kernels.run(kernels.forward, call);
  }
  if (keeps) {
    const auto owner = own<NodePointer>(new TrainableEpsLayerNormBackward(x, o, kernels));
    torch::autograd::set_history(y, owner);
    tell_of(owner);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// set_rows(row_kernels, row_backward): what this calls.
inline PyObject* set_rows(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "set_rows takes 2 arguments");
  for (int i : {0, 1}) Py_IncRef(arguments[i]);
  Py_DecRef(std::exchange(python_row_kernels, arguments[0]));
  Py_DecRef(std::exchange(python_row_backward, arguments[1]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace fused_norm
