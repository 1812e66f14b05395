// The chain of a call: as C functions, which the node and Python call, and as PyTorch's ops. One build
// serves every version of PyTorch and Python.

#include <torch/csrc/stable/library.h>

#include "gradients.h"
#include "eight_bits_gradients.h"
#include "eight_bits_layers.h"
#include "eight_bits_mlp.h"
#include "eight_bits_norm.h"
#include "family_ops.h"
#include "row_ops.h"

namespace {

using namespace fused_norm;

thread_local std::string error;

// No exception leaves a C function.
template <class Body>
int guarded(Body body) {
  try {
    body();
    return DONE;
  } catch (const Declined&) {
    return LEFT;
  } catch (const std::exception& e) {
    error = e.what();
    return FAILED;
  }
}

Tensors borrowed(const AtenTensorHandle* handles, size_t count) {
  Tensors tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) tensors.push_back(Tensor::borrowed(handles[i]));
  return tensors;
}

Operands operands_of(const AtenTensorHandle* tensors, size_t count) {
  Operands t(count);
  for (size_t i = 0; i < t.flat.size(); ++i) {
    if (tensors[i]) t.flat[i] = Tensor::borrowed(tensors[i]);
  }
  return t;
}

int chain_forward(
    const Spec* spec, Conditions conditions, size_t count, const AtenTensorHandle* tensors,
    int keeps, AtenTensorHandle* results) {
  return guarded([&] {
    std::fill(results, results + 2 * count + EXTRAS, nullptr);
    AtenTensorHandle* const extras = results + count;
    if (spec->normalization == TRAINABLE_EPS) {
      const auto x = Tensor::borrowed(tensors[X]), o = Tensor::borrowed(tensors[GAMMA]);
      const OnDevice on_device(x);
      if (!are_rows_with_scalar(x, o)) throw Declined();
      extras[NORM] = row_result(RowOp::TRAINABLE_EPS, {x}, o).released();
      return;
    }
    const auto t = operands_of(tensors, count);
    const OnDevice on_device(t[X]);
    const auto extent = extent_of(*spec, t);
    // Only autocast narrows products.
    if (!extent || t.is_narrow()) throw Declined();
    const NoGrad no_grad;
    const auto kernels = kernels_of(*spec, t, conditions);
    const auto fold = fold_for(*spec, t, *extent, keeps != 0, kernels);
    if (!fold) throw Declined();
    const auto found = forward(*spec, t, *extent, keeps != 0, *fold, kernels);
    for (size_t i = 0; i < found.outputs.size(); ++i) results[i] = found.outputs[i].released();
    extras[SUM] = found.sum.released();
    extras[NORM] = found.norm.released();
    extras[KEPT_MEAN] = found.mean.released();
    extras[KEPT_RSTD] = found.rstd.released();
    for (size_t i = 0; i < found.products.size(); ++i) {
      extras[EXTRAS + i] = found.products[i].released();
    }
  });
}

// Hopper's products for calls of dense tensors on the current stream.
const Product& product_on(int32_t dtype, int32_t device) {
  Question question{};
  question.dtype = dtype;
  question.device = device;
  question.stream = reinterpret_cast<int64_t>(current_stream(device));
  question.is_alone = fused_norm::python.conditions(device) & 1;
  return loaded(question).product;
}

int chain_backward(
    const Spec* spec, Conditions conditions, size_t count, size_t tensor_count,
    const AtenTensorHandle* tensors, size_t grad_count, const AtenTensorHandle* grads,
    const uint8_t* needed, AtenTensorHandle* gradients) {
  return guarded([&] {
    const auto t = operands_of(tensors, count);
    const auto given = borrowed(grads, grad_count);
    const OnDevice on_device(t[X]);
    if (spec->normalization == TRAINABLE_EPS) {
      const Tensor &dy = given[0], &x = t[X], &o = t[GAMMA];
      if (!are_rows_with_scalar(x, o) || dy.dtype() != x.dtype()) throw Declined();
      const auto found = trainable_eps_gradients(dense(dy), x, o, needed[X], needed[GAMMA]);
      gradients[X] = found[0].released();
      gradients[GAMMA] = found[1].released();
      return;
    }
    // Tensors may have new memory since the forward, from an assignment to their `data`.
    const auto extent = extent_of(*spec, t);
    for (const auto& g : given) {
      if (g.defined() && g.dtype() != t.product_dtype()) throw Declined();
    }
    if (!extent) throw Declined();
    const NoGrad no_grad;
    const auto wanted = wanted_of(*spec, t.count(), Wanted(needed, needed + t.flat.size()), given);
    const auto products = borrowed(tensors + t.flat.size(), tensor_count - t.flat.size());
    const auto result = backward(
        *spec, t, *extent, products, given, wanted, {}, kernels_of(*spec, t, conditions));
    for (size_t place = 0; place < result.found.size(); ++place) {
      const auto& gradient = place == OUT_RESIDUAL ? given[0]
          : is_summand(place)                      ? result.found[X]
                                                   : result.found[place];
      if (needed[place]) gradients[place] = gradient.released();
    }
  });
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const Chain* chain_functions() {
  static const Chain functions{chain_forward, chain_backward, [] { return error.c_str(); }};
  return &functions;
}

EXPORTED void chain_python_failed(const char* message) {
  python_error = message;
}

EXPORTED void chain_tell(const Python* told) {
  fused_norm::python = *told;
}

// The faster strategy of a call on a CPU according to its costs: for tests.
EXPORTED int64_t chain_fastest(
    const double* costs, int64_t activation, int64_t M, int64_t K, int64_t N, int64_t threads,
    int follows) {
  Call call{};
  call.activation = activation;
  call.M = M;
  call.K = K;
  call.threads = threads;
  return Costs(costs).fastest(call, N, follows != 0);
}

EXPORTED void chain_set_frozen(int level) {
  frozen_level = level;
  folds.clear();
}

// Whether a product alone, of aligned dense tensors, adds a residual in its epilogue; after it multiplied
// by a gate if there are groups of rows with one each.
EXPORTED int chain_adds(
    int32_t dtype, int32_t device, int64_t M, int64_t N, int64_t K, int64_t groups) {
  bool adds = false;
  const int status = guarded([&] {
    const auto& product = product_on(dtype, device);
    auto call = rows_call(M, N, product.context);
    call.K = K;
    call.x = call.weight = call.bias = call.residual = WANTED;
    if (groups) set_gate(call, WANTED, groups, N);
    adds = product.plan_linear && product.plan_linear(&call) == 0 && call.strategy == FUSED;
  });
  return status == DONE && adds;
}

// Whether one kernel adds up the gradients of the normalized rows [M, K] of several Linear layers, of
// aligned dense tensors; `passes` if it may also pass over these rows.
EXPORTED int chain_adds_up(
    int32_t dtype, int32_t device, int64_t M, int64_t K, const int64_t* sizes, int32_t count,
    int32_t passes) {
  bool adds = false;
  const int status = guarded([&] {
    const auto& product = product_on(dtype, device);
    if (!product.input_gradients || count > MOST_PARTS) return;
    std::array<Part, MOST_PARTS> parts{};
    auto call = rows_call(M, 0, product.context);
    call.K = K;
    call.parts = parts.data();
    call.dx = call.dz = WANTED;
    for (int32_t i = 0; i < count; ++i) {
      auto& part = parts[static_cast<size_t>(call.part_count++)];
      call.N += part.N = sizes[i];
      part.weight = part.dy = WANTED;
    }
    const auto is_planned = [&](auto plan) { return plan(&call) == 0 && call.strategy == FUSED; };
    adds = is_planned(product.plan_input_gradients) ||
        (passes && product.passed_rows && is_planned(product.plan_passed_rows));
  });
  return status == DONE && adds;
}

namespace {

void register_all(torch::stable::detail::StableLibrary& m) {
  m.impl("norm_linear_forward", TORCH_BOX(&norm_linear_forward));
  m.impl("norm_linear_forward_folded", TORCH_BOX(&norm_linear_forward_folded));
  m.impl("norm_linear_wanted_fold", TORCH_BOX(&norm_linear_wanted_fold));
  m.impl("norm_linear_fold", TORCH_BOX(&norm_linear_fold));
  m.impl("norm_linear_backward", TORCH_BOX(&norm_linear_backward));
  m.impl("norm_linear_backward_into", TORCH_BOX(&norm_linear_backward_into));
  m.impl("add_statistics", TORCH_BOX(&add_statistics));
  m.impl("row_statistics", TORCH_BOX(&row_statistics));
  m.impl("linear_add", TORCH_BOX(&linear_add_op));
  m.impl("linear_gated_add", TORCH_BOX(&linear_gated_add_op));
  m.impl("linear_add_backward", TORCH_BOX(&linear_add_backward));
  m.impl("trainable_eps_layer_norm", TORCH_BOX(&trainable_eps_op));
  m.impl("trainable_eps_layer_norm_backward", TORCH_BOX(&trainable_eps_backward_op));
  m.impl("composed_mean", TORCH_BOX(&row_op<RowOp::MEAN>));
  m.impl("composed_norm", TORCH_BOX(&row_op<RowOp::NORM>));
  m.impl("composed_norm_backward", TORCH_BOX(&row_op_of_two<RowOp::NORM_BACKWARD>));
  m.impl("composed_div", TORCH_BOX(&row_op_of_two<RowOp::DIV>));
  m.impl("composed_div_backward", TORCH_BOX(&div_backward_op));
  m.impl("fp8_quantize", TORCH_BOX(&fp8_quantize));
  m.impl("fp8_norm", TORCH_BOX(&fp8_norm));
  m.impl("fp8_norm_rows", TORCH_BOX(&fp8_norm_rows));
  m.impl("fp8_hidden", TORCH_BOX(&fp8_hidden));
  m.impl("fp8_linear", TORCH_BOX(&fp8_linear));
  m.impl("fp8_linears", TORCH_BOX(&fp8_linears));
  m.impl("fp8_layers", TORCH_BOX(&fp8_layers));
  m.impl("fp8_layers_backward", TORCH_BOX(&fp8_layers_backward));
  m.impl("fp8_mlp_backward", TORCH_BOX(&fp8_mlp_backward));
}

}  // namespace

// The same functions for each device: tensors say where they are.
STABLE_TORCH_LIBRARY_IMPL(fused_norm, CPU, m) {
  register_all(m);
}

STABLE_TORCH_LIBRARY_IMPL(fused_norm, CUDA, m) {
  register_all(m);
}

__attribute__((constructor)) static void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { fused_norm::forked = true; });
}
