// The chain of a call, and the ops that run it: in eager mode, in compiled graphs and in exported
// programs. Built once, it serves every version of PyTorch and Python.

#include <sstream>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "backward.h"
#include "rows.h"

namespace {

using namespace fused_norm;

thread_local std::string error;
// The message of what an op in Python raised last: PyTorch before 2.13 keeps none.
thread_local std::string python_error;

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

Tensors borrowed(const AtenTensorHandle* handles, int64_t count) {
  Tensors tensors;
  tensors.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) tensors.push_back(Tensor::borrowed(handles[i]));
  return tensors;
}

Operands operands_of(const AtenTensorHandle* tensors, int64_t count) {
  Operands t(static_cast<size_t>(count));
  t.flat = borrowed(tensors, static_cast<int64_t>(t.flat.size()));
  return t;
}

Kernels kernels_of(const Spec& spec, const Operands& t, Conditions conditions) {
  return Kernels::find(t[X], t.product_dtype(), spec.normalization, spec.invariant, conditions);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* chain_error() {
  return error.c_str();
}

EXPORTED void chain_python_failed(const char* message) {
  python_error = message;
}

EXPORTED void chain_tell(const Python* told) {
  fused_norm::python = *told;
}

// The faster way of a call on a CPU by what was measured: for tests.
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

// Whether a product by itself, of tensors that lie as they should, adds a residual on its way.
EXPORTED int chain_adds(int32_t dtype, int32_t device, int64_t M, int64_t N, int64_t K) {
  bool adds = false;
  const int status = guarded([&] {
    Question question{};
    question.dtype = dtype;
    question.device = device;
    question.stream = reinterpret_cast<int64_t>(current_stream(device));
    question.is_alone = fused_norm::python.conditions(device) & 1;
    const auto& product = loaded(question).product;
    auto call = rows_call(M, N, product.context);
    call.K = K;
    call.x = call.weight = call.bias = call.residual = WANTED;
    adds = product.plan_linear && product.plan_linear(&call) == 0 && call.way == FUSED;
  });
  return status == DONE && adds;
}

EXPORTED int chain_forward(
    const Spec* spec, Conditions conditions, int64_t count, const AtenTensorHandle* tensors,
    int keeps, AtenTensorHandle* results) {
  return guarded([&] {
    const auto t = operands_of(tensors, count);
    std::fill(results, results + 2 * count + EXTRAS, nullptr);
    AtenTensorHandle* const extras = results + count;
    const OnDevice on_device(t[X]);
    if (spec->normalization == TRAINABLE_EPS) {
      if (!are_rows_with_scalar(t[X], t[GAMMA])) throw Declined();
      extras[NORM] = row_result(RowOp::TRAINABLE_EPS, {t[X]}, t[GAMMA]).released();
      return;
    }
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

EXPORTED int chain_backward(
    const Spec* spec, Conditions conditions, int64_t count, const AtenTensorHandle* tensors,
    int64_t product_count, const AtenTensorHandle* products, int64_t grad_count,
    const AtenTensorHandle* grads, const uint8_t* needed, AtenTensorHandle* gradients) {
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
    // Tensors may have been given other memory since the forward, by an assignment to their `data`.
    const auto extent = extent_of(*spec, t);
    for (const auto& g : given) {
      if (g.defined() && g.dtype() != t.product_dtype()) throw Declined();
    }
    if (!extent) throw Declined();
    const NoGrad no_grad;
    const auto wanted = wanted_of(*spec, t.count(), Wanted(needed, needed + t.flat.size()), given);
    const auto result = backward(
        *spec, t, *extent, borrowed(products, product_count), given, wanted, {},
        kernels_of(*spec, t, conditions));
    for (size_t place = 0; place < result.found.size(); ++place) {
      const auto& gradient = place == OUT_RESIDUAL ? given[0]
          : is_summand(place)                      ? result.found[X]
                                                   : result.found[place];
      if (needed[place]) gradients[place] = gradient.released();
    }
  });
}

namespace {

using Given = torch::stable::Tensor;
using Optional = std::optional<Given>;
using Handles = std::vector<Given>;
using Optionals = std::vector<Optional>;

Tensor tensor_of(const Optional& given) {
  return given ? Tensor::borrowed(given->get()) : Tensor();
}

Given given_of(const Tensor& tensor) {
  return Given(tensor.released());
}

// The number of a norm or an activation.
int64_t number_of(const std::string& name) {
  if (name.empty()) return 0;
  std::istringstream numbers(fused_norm::python.numbers);
  for (std::string item; numbers >> item;) {
    const auto end = item.find('=');
    if (item.compare(0, end, name) == 0) return std::stoll(item.substr(end + 1));
  }
  throw std::runtime_error("fused_norm: no norm or activation is called " + name);
}

// What an op does where Python has to: with parameters that are frozen, or with empty tensors.
template <class... Arguments>
Handles call_python(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  python_error.clear();
  const auto status = torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION);
  if (status != AOTI_TORCH_SUCCESS && !python_error.empty()) throw std::runtime_error(python_error);
  check(status, op);
  return torch::stable::detail::to<Handles>(stack[0]);
}

// The arguments that every op of the family begins with.
#define TENSORS                                                                                 \
  Given x, Optional residual, Optional gamma, Optional beta, Optional scale, Optional shift,    \
      Optional mean, Optional rstd, Optional out_weight, Optional out_bias,                     \
      Optional out_residual, Handles weights, Optionals biases
#define SPEC                                                                                    \
  std::string normalization, std::string activation, double eps, double weight_offset,          \
      bool joined, bool returns_sum, bool returns_norm, bool recompute, bool batch_invariant
#define ARGUMENTS_OF_CALL                                                                             \
  x, residual, gamma, beta, scale, shift, mean, rstd, out_weight, out_bias, out_residual,       \
      weights, biases, normalization, activation, eps, weight_offset, joined, returns_sum,      \
      returns_norm, recompute, batch_invariant

Spec spec_of(SPEC) {
  return {number_of(normalization), number_of(activation), eps, weight_offset, joined, returns_sum,
          returns_norm, recompute, batch_invariant};
}

Tensor as_matrix(const Tensor& weight) {
  return !weight.defined() || weight.dim() != 2 || is_matrix(weight) ? weight : dense(weight);
}

// The tensors, in dense memory but for weights that products take as they lie.
Operands operands_of(TENSORS) {
  if (weights.size() != biases.size()) {
    throw std::runtime_error("fused_norm: as many biases as weights are needed, None for none");
  }
  Operands t(weights.size());
  const Optional named[] = {x, residual, gamma, beta, scale, shift, mean, rstd, out_weight,
                            out_bias, out_residual};
  for (size_t place = 0; place < NAMED; ++place) {
    const auto tensor = tensor_of(named[place]);
    t.flat[place] = place == OUT_WEIGHT ? as_matrix(tensor) : dense(tensor);
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    t.flat[NAMED + i] = as_matrix(tensor_of(weights[i]));
    t.flat[NAMED + weights.size() + i] = dense(tensor_of(biases[i]));
  }
  return t;
}

bool is_empty(const Given& x, const Handles& weights, const Optional& out_weight) {
  const auto has_none = [](const Given& v) { return v.numel() == 0; };
  return has_none(x) || std::any_of(weights.begin(), weights.end(), has_none) ||
      (out_weight && has_none(*out_weight));
}

Extent checked(const Spec& spec, const Operands& t) {
  const auto extent = extent_of(spec, t);
  if (!extent) throw std::runtime_error("fused_norm: no kernel takes such tensors as these");
  return *extent;
}

// Returns the results in one list, without those that are not there.
Handles flat(const Results& results) {
  Handles all;
  const auto append = [&](const Tensor& tensor) {
    if (tensor.defined()) all.push_back(given_of(tensor));
  };
  for (const auto& y : results.outputs) append(y);
  for (const auto& one : {results.sum, results.norm, results.mean, results.rstd}) append(one);
  for (const auto& h : results.products) append(h);
  return all;
}

Handles run_forward(TENSORS, SPEC, bool keeps, const Fold* given) {
  const auto t = operands_of(
      x, residual, gamma, beta, scale, shift, mean, rstd, out_weight, out_bias, out_residual,
      weights, biases);
  const auto spec = spec_of(
      normalization, activation, eps, weight_offset, joined, returns_sum, returns_norm, recompute,
      batch_invariant);
  const auto extent = checked(spec, t);
  const OnDevice on_device(t[X]);
  const NoGrad no_grad;
  const auto kernels = kernels_of(spec, t, {});
  const auto fold = given ? *given : fold_for(spec, t, extent, keeps, kernels);
  if (!fold) throw Declined();
  auto results = forward(spec, t, extent, keeps, *fold, kernels);
  if (given) folds.keep(spec, t, *given, kernels.is_captured);
  if (results.sum.defined()) {
    results.sum = laid_as_sum(results.sum, {tensor_of(x), tensor_of(residual)});
  }
  return flat(results);
}

Handles norm_linear_forward(TENSORS, SPEC, bool keeps) {
  if (!is_empty(x, weights, out_weight)) {
    try {
      return run_forward(ARGUMENTS_OF_CALL, keeps, nullptr);
    } catch (const Declined&) {
    }
  }
  return call_python("fused_norm::norm_linear_forward_by_python", ARGUMENTS_OF_CALL, keeps);
}

// The same with the fold of frozen parameters, which is for an activation in the epilogue; -1 for none.
Handles norm_linear_forward_folded(
    TENSORS, SPEC, bool keeps, Optional fold_weight, Optional fold_sums, int64_t fold_activation,
    bool is_offloaded) {
  Fold fold{tensor_of(fold_weight), tensor_of(fold_sums), fold_activation, is_offloaded};
  return run_forward(ARGUMENTS_OF_CALL, keeps, &fold);
}

// The activation that a fold of a call's parameters would be for, or -1.
int64_t norm_linear_wanted_fold(TENSORS, SPEC) {
  const auto t = operands_of(
      x, residual, gamma, beta, scale, shift, mean, rstd, out_weight, out_bias, out_residual,
      weights, biases);
  const auto spec = spec_of(
      normalization, activation, eps, weight_offset, joined, returns_sum, returns_norm, recompute,
      batch_invariant);
  return wanted_fold(spec, t, checked(spec, t), kernels_of(spec, t, {}));
}

// The fold of parameters for an activation in the epilogue, in two tensors.
Handles norm_linear_fold(
    Optional gamma, Optional beta, Handles weights, Optionals biases, std::string normalization,
    double weight_offset, int64_t activation) {
  // A weight stands for x, whose values nobody asks for.
  const auto t = operands_of(
      weights[0], {}, gamma, beta, {}, {}, {}, {}, {}, {}, {}, weights, biases);
  Spec spec{number_of(normalization), activation};
  spec.weight_offset = weight_offset;
  spec.is_joined = spec.is_gated();
  const auto extent = checked(spec, t);
  const OnDevice on_device(t[X]);
  const auto kernels = kernels_of(spec, t, {});
  auto call = norm_call(spec, t, extent, kernels.product.context);
  give_weights(call, spec, t, extent, true);
  Group parts;
  if (has_own_outputs(spec, t)) parts.give(call, t);
  const Fold fold{empty(Shape{extent.N, extent.K}, t[X]), empty(Shape{2, extent.N}, t[X], FLOAT32)};
  fold.give(call);
  if (!kernels.product.fold) throw std::runtime_error("fused_norm: no kernel folds here");
  launch(kernels.product.fold, call, t[X]);
  return {given_of(fold.weight), given_of(fold.sums)};
}

std::pair<Gradients, Wanted> gradients_of(
    TENSORS, SPEC, const Handles& products, const Optionals& grad_outputs,
    const std::vector<int64_t>& wanted, const Optionals& main_grads) {
  const auto t = operands_of(
      x, residual, gamma, beta, scale, shift, mean, rstd, out_weight, out_bias, out_residual,
      weights, biases);
  const auto spec = spec_of(
      normalization, activation, eps, weight_offset, joined, returns_sum, returns_norm, recompute,
      batch_invariant);
  const auto extent = checked(spec, t);
  const OnDevice on_device(t[X]);
  const NoGrad no_grad;
  Tensors kept, grads, totals;
  for (const auto& h : products) kept.push_back(Tensor::borrowed(h.get()));
  for (const auto& g : grad_outputs) grads.push_back(tensor_of(g));
  for (const auto& g : main_grads) totals.push_back(tensor_of(g));
  Wanted flags(t.flat.size());
  for (const int64_t place : wanted) flags.at(static_cast<size_t>(place)) = true;
  auto found = backward(
      spec, t, extent, kept, grads, flags, totals, kernels_of(spec, t, {}));
  return {std::move(found), std::move(flags)};
}

Handles norm_linear_backward(
    TENSORS, SPEC, Handles products, Optionals grad_outputs, std::vector<int64_t> wanted) {
  if (is_empty(x, weights, out_weight)) {
    return call_python(
        "fused_norm::norm_linear_backward_by_python", ARGUMENTS_OF_CALL, products, grad_outputs, wanted);
  }
  const auto found = gradients_of(ARGUMENTS_OF_CALL, products, grad_outputs, wanted, {}).first;
  Handles all;
  for (const int64_t place : wanted) {
    all.push_back(given_of(found.found[static_cast<size_t>(place)]));
  }
  return all;
}

// The same where weights have a `main_grad`: a tensor without elements stands for a gradient that was
// added, and the normalized rows follow where a weight's is to be made of them.
Handles norm_linear_backward_into(
    TENSORS, SPEC, Handles products, Optionals grad_outputs, std::vector<int64_t> wanted,
    Optionals main_grads) {
  const auto found = gradients_of(ARGUMENTS_OF_CALL, products, grad_outputs, wanted, main_grads).first;
  Handles all;
  for (const int64_t place : wanted) {
    const auto& gradient = found.found[static_cast<size_t>(place)];
    all.push_back(given_of(gradient.defined() ? gradient : empty(Shape{0}, tensor_of(x))));
  }
  if (found.z.defined()) all.push_back(given_of(found.z));
  return all;
}

Kernels kernels_for(const Tensor& x, bool invariant) {
  return Kernels::find(x, x.dtype(), 0, invariant, {});
}

Given linear_add_op(
    Given x, Given weight, Optional bias, Optional residual, bool batch_invariant) {
  const auto rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  const NoGrad no_grad;
  return given_of(linear_add(
      rows, as_matrix(tensor_of(weight)), dense(tensor_of(bias)), dense(tensor_of(residual)),
      batch_invariant, kernels_for(rows, batch_invariant)));
}

// Dense rows in the sizes of another tensor.
Tensor shaped_as(const Tensor& rows, const Tensor& like) {
  return rows.viewed(like.sizes(), dense_strides(like.sizes()));
}

Handles linear_add_backward(
    Given grad_output, Given x, Given weight, std::vector<int64_t> wanted) {
  const auto rows = dense(tensor_of(x)).rows(), dy = dense(tensor_of(grad_output)).rows();
  const auto by = as_matrix(tensor_of(weight));
  const OnDevice on_device(rows);
  const NoGrad no_grad;
  std::array<bool, 3> is_wanted{};
  for (const int64_t place : wanted) is_wanted.at(static_cast<size_t>(place)) = true;
  const auto kernels = kernels_for(rows, false);
  std::array<Tensor, 3> found;
  if (is_wanted[0]) found[0] = shaped_as(input_gradient(dy, by, false, kernels), tensor_of(x));
  found[1] =
      parameter_gradients(dy, rows, by, is_wanted[1], is_wanted[2], false, found[2], kernels);
  Handles all;
  for (const int64_t place : wanted) all.push_back(given_of(found[static_cast<size_t>(place)]));
  return all;
}

// The sum of x and a residual, the mean of its rows (of a LayerNorm) and their factor.
Handles statistics_of(
    const Given& given, const Optional& residual, const std::string& normalization, double eps) {
  Operands t(0);
  t.flat[X] = dense(tensor_of(given));
  t.flat[RESIDUAL] = dense(tensor_of(residual));
  const Tensor& x = t[X];
  Spec spec{number_of(normalization), 0, eps};
  const OnDevice on_device(x);
  const auto wide = statistics_dtype(x.dtype());
  const auto rows = x.sizes().first(static_cast<size_t>(x.dim()) - 1);
  Tensor total, mean;
  if (residual) total = empty_like(x);
  if (spec.has_mean()) mean = empty(rows, x, wide);
  const auto rstd = empty(rows, x, wide);
  if (x.numel()) {
    const auto kernels = kernels_for(x, false);
    const auto& passes = kernels.norm_passes;
    Call call{};
    call.K = x.size(-1);
    call.M = x.numel() / call.K;
    call.eps = eps;
    call.context = passes.context;
    call.threads = threads();
    call.normalization = spec.normalization;
    call.x = address(x);
    call.residual = address(t[RESIDUAL]);
    call.sum = address(total);
    call.mean = address(mean);
    call.rstd = address(rstd);
    run(passes.plan_normalize, passes.normalize, call, x);
  } else {
    for (const auto& v : {mean, rstd}) {
      if (v.defined()) check(aoti_torch_zero_(v.get()), "zero_");
    }
  }
  Handles all;
  for (const auto& v : {total, mean, rstd}) {
    if (v.defined()) all.push_back(given_of(v));
  }
  return all;
}

Handles add_statistics(Given x, Given residual, std::string normalization, double eps) {
  return statistics_of(x, residual, normalization, eps);
}

Handles row_statistics(Given x, std::string normalization, double eps) {
  return statistics_of(x, std::nullopt, normalization, eps);
}

template <RowOp op>
Given row_op(Given x) {
  const auto rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  return given_of(row_result(op, {rows}));
}

template <RowOp op>
Given row_op_of_two(Given a, Given b) {
  const auto one = dense(tensor_of(a)), two = dense(tensor_of(b));
  const OnDevice on_device(one);
  return given_of(row_result(op, {one, two}));
}

// What a schema cannot promise to be None has no elements.
Given given_or_empty(const Tensor& gradient, const Tensor& like) {
  return given_of(gradient.defined() ? gradient : empty(Shape{0}, like));
}

Given trainable_eps_op(Given x, Given o) {
  const auto rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  return given_of(row_result(RowOp::TRAINABLE_EPS, {rows}, tensor_of(o)));
}

std::tuple<Given, Given> trainable_eps_backward_op(
    Given grad_output, Given x, Given o, std::vector<bool> mask) {
  const auto dy = dense(tensor_of(grad_output)), rows = dense(tensor_of(x));
  const OnDevice on_device(rows);
  const auto found = trainable_eps_gradients(dy, rows, tensor_of(o), mask.at(0), mask.at(1));
  return {given_or_empty(found[0], rows), given_or_empty(found[1], rows)};
}

std::tuple<Given, Given> div_backward_op(
    Given grad_output, Given a, Given b, std::vector<bool> mask) {
  const auto dy = dense(tensor_of(grad_output)), one = dense(tensor_of(a)), two = dense(tensor_of(b));
  const OnDevice on_device(one);
  Tensor da, db;
  if (mask.at(0)) da = empty_like(one);
  if (mask.at(1)) db = empty_like(two);
  if (one.numel()) run_rows(RowOp::DIV_BACKWARD, {dy, one, two}, {da, db});
  return {given_or_empty(da, one), given_or_empty(db, one)};
}

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
  m.impl("linear_add_backward", TORCH_BOX(&linear_add_backward));
  m.impl("trainable_eps_layer_norm", TORCH_BOX(&trainable_eps_op));
  m.impl("trainable_eps_layer_norm_backward", TORCH_BOX(&trainable_eps_backward_op));
  m.impl("composed_mean", TORCH_BOX(&row_op<RowOp::MEAN>));
  m.impl("composed_norm", TORCH_BOX(&row_op<RowOp::NORM>));
  m.impl("composed_norm_backward", TORCH_BOX(&row_op_of_two<RowOp::NORM_BACKWARD>));
  m.impl("composed_div", TORCH_BOX(&row_op_of_two<RowOp::DIV>));
  m.impl("composed_div_backward", TORCH_BOX(&div_backward_op));
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
