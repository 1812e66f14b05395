// The backward of a call of the op family: one native call if there is a kernel for it, otherwise
// passes over rows around products.

#pragma once

#include "forward.h"
#include "parameters.h"

namespace fused_norm {

// Whether a tensor is added to x, so that its gradient is that of x.
constexpr bool is_summand(size_t place) { return place == X || place == RESIDUAL; }

// Which gradients to compute, by place, for tensors that require one: those on which results with a
// gradient depend, like `reached` in composition.py. Summands of x share one gradient, at X; what is
// added at the end has the output's.
inline Wanted wanted_of(
    const Spec& spec, size_t count, const Wanted& needed, const Tensors& grads) {
  const size_t outputs = grads.size() - spec.returns_sum - spec.returns_norm;
  const bool is_through = std::any_of(
      grads.begin(), grads.begin() + static_cast<int64_t>(outputs),
      [](const Tensor& g) { return g.defined(); });
  const bool is_norm = is_through || (spec.returns_norm && grads.back().defined());
  Wanted wanted(needed.size());
  for (size_t place = 0; place < needed.size(); ++place) {
    const bool is_of_norm = place < MEAN;
    const size_t layer = (place - NAMED) % count;
    const bool is_reached = is_of_norm ? is_norm
        : place >= NAMED && outputs == count ? grads[layer].defined()
                                             : is_through;
    if (!needed[place] || !is_reached || place == OUT_RESIDUAL) continue;
    wanted[is_summand(place) ? size_t{X} : place] = true;
  }
  return wanted;
}

// Computes gradients by place, once. The residuals' are those of x and of the output.
class Backward {
 public:
  // x is the sum if there was a residual. `grads` are dense gradients of the outputs, the sum and the
  // normalized rows, if these are results. `wanted` has gradients that depend on more than the
  // sum's. `main_grads` has one tensor for each weight, or is empty.
  Backward(
      const Spec& spec, const Operands& t, const Extent& extent, const Tensors& products,
      const Tensors& grads, const Wanted& wanted, const Tensors& main_grads,
      const Kernels& kernels)
      : spec_(spec), t_(t), extent_(extent), products_(products), main_grads_(main_grads),
        wanted_(wanted), kernels_(kernels), homes_(t.flat.size()) {
    main_grads_.resize(t.count());
    result_.found.resize(t.flat.size());
    size_t outputs = grads.size() - spec.returns_sum - spec.returns_norm;
    for (size_t i = 0; i < outputs; ++i) {
      das_.push_back(grads[i].defined() ? grads[i].rows() : Tensor());
    }
    if (spec.returns_sum) dsum_ = grads[outputs++];
    if (spec.returns_norm && grads[outputs].defined()) dnorm_ = grads[outputs].rows();
    wants_norm_ = std::any_of(&wanted[X], &wanted[MEAN], [](bool w) { return w; });
    wants_weight_ = any(NAMED);
    wants_bias_ = any(NAMED + t.count());
  }

  // Lets gradients of weights and biases be written to these tensors, by place; undefined for new memory.
  void write_to(const Tensors& homes) { homes_ = homes; }

  // Whether one kernel adds up what several weights, without an activation, give the gradient of the
  // normalized rows, where that takes less time than to concatenate gradients. CPUs have no such kernel,
  // and need none.
  bool adds_up() const {
    if (!wants_norm_) return true;
    if (!kernels_.product.input_gradients) return t_[X].is_cpu();
    if (dnorm_.defined() || t_.is_narrow() || spec_.invariant) return false;
    Group passed, summed;
    return planned_rows(passed, das_) ||
        planned_input_gradients(summed, das_, t_, extent_, kernels_);
  }

  Gradients run() {
    // The second layer's weight needs what it read, if nothing was activated.
    if ((spec_.activation || wanted_[OUT_WEIGHT]) && products_.empty()) {
      const auto z = normalized(spec_, t_, extent_, kernels_);
      products_ = products_of(spec_, z, t_, extent_, kernels_);
    }
    const Tensor dout = t_[OUT_WEIGHT].defined() ? second_linear() : Tensor();
    before_activation();
    if (dout.defined()) second_parameters(dout);
    if (!by_product()) around_products();
    return std::move(result_);
  }

 private:
  Tensor& found(size_t place) { return result_.found[place]; }
  bool any(size_t first) const {
    return std::any_of(&wanted_[first], &wanted_[first] + t_.count(), [](bool w) { return w; });
  }
  Tensor sum_of_rows(const Tensor& rows) const {
    return fused_norm::sum_of_rows(dense(rows), kernels_.passes);
  }

  // Replaces the output's gradient with that of the activation, or of its input, and returns it.
  Tensor second_linear() {
    const Tensor dout = das_[0];
    das_[0] = Tensor();
    if (dout.defined() && (wants_norm_ || wants_weight_ || wants_bias_) &&
        !before_activation_by_product(dout)) {
      das_[0] = input_gradient(dout, t_[OUT_WEIGHT], spec_.invariant, kernels_);
    }
    return dout;
  }

  // Computes the gradient of the activation's input, and the activation if it is wanted, in the product
  // that gives the activation's gradient; false if its plan declines. Biases are left to later kernels.
  bool before_activation_by_product(const Tensor& dout) {
    const auto& product = kernels_.product;
    const Tensor& weight = t_[OUT_WEIGHT];
    if (!product.input_gradient || !spec_.activation || spec_.invariant || !dout.is_contiguous() ||
        !weight.is_contiguous() || (wants_bias_ && t_.count() > 1)) {
      return false;
    }
    const auto h = products_[0].rows();
    auto call = rows_call(extent_.M, dout.size(1), product.context);
    call.K = weight.size(1);
    call.activation = spec_.activation;
    call.dy = address(dout);
    call.weight = address(weight);
    call.h = address(h);
    call.dh = WANTED;
    if (wanted_[OUT_WEIGHT]) call.a = WANTED;
    if (product.plan_input_gradient(&call) != 0 || call.strategy != FUSED) return false;
    const auto dh = empty_like(h);
    call.dh = address(dh);
    if (call.a) {
      a_ = empty(Shape{extent_.M, call.K}, h);
      call.a = address(a_);
    }
    launch(product.input_gradient, call, dout);
    dhs_.push_back(dh);
    return true;
  }

  // The gradients of the second Linear layer's parameters.
  void second_parameters(const Tensor& dout) {
    if (wanted_[OUT_WEIGHT] && !a_.defined()) {
      a_ = (spec_.activation ? activated(spec_, products_[0], kernels_) : products_[0]).rows();
    }
    found(OUT_WEIGHT) = parameter_gradients(
        dout, a_, t_[OUT_WEIGHT], wanted_[OUT_WEIGHT], wanted_[OUT_BIAS], spec_.invariant,
        found(OUT_BIAS), kernels_);
  }

  // The gradient of each product, and of each bias whose gradient no later kernel computes.
  void before_activation() {
    const auto count = t_.count();
    if (!dhs_.empty()) dbiases_.emplace_back();
    for (size_t i = dhs_.size(); i < das_.size(); ++i) {
      const Tensor& da = das_[i];
      const bool wants_bias = spec_.is_joined ? wants_bias_ : wanted_[NAMED + count + i];
      dbiases_.emplace_back();
      if (!da.defined() || !spec_.activation || !(wants_norm_ || wants_weight_ || wants_bias)) {
        if (da.defined() && das_.size() < count && wants_bias) dbiases_[i] = sum_of_rows(da);
        dhs_.push_back(da);
        continue;
      }
      const auto h = products_[i].rows();
      const auto dh = empty_like(h);
      if (wants_bias) dbiases_[i] = empty(Shape{h.size(1)}, h);
      auto call = rows_call(extent_.M, da.size(1), kernels_.passes.context);
      call.activation = spec_.activation;
      call.da = address(da);
      call.h = address(h);
      call.dh = address(dh);
      call.dbias = address(dbiases_[i]);
      if (t_[OUT_WEIGHT].defined() && wanted_[OUT_WEIGHT]) {
        a_ = empty_like(da);
        call.a = address(a_);
      }
      fused_norm::run(
          kernels_.passes.plan_activate_backward, kernels_.passes.activate_backward, call, h);
      dhs_.push_back(dh);
    }
    if (spec_.is_joined && count > 1) split();
    for (size_t i = 0; i < dbiases_.size(); ++i) {
      if (wanted_[NAMED + count + i]) found(NAMED + count + i) = dbiases_[i];
    }
  }

  // Gives each weight its columns of a joined gradient.
  void split() {
    const Tensor dh = dhs_[0], dbias = dbiases_[0];
    dhs_.clear();
    dbiases_.clear();
    int64_t first = 0;
    for (size_t i = 0; i < t_.count(); ++i) {
      const auto N = t_.weight(i).size(0);
      dhs_.push_back(dh.defined() ? dh.narrowed(first, N) : Tensor());
      // Each has its own memory, so that keeping one does not keep the others.
      dbiases_.push_back(dbias.defined() ? cloned(dbias.narrowed(first, N)) : Tensor());
      first += N;
    }
  }

  // A gradient's place, its address in a record, and the tensor that it is shaped like.
  struct Wish {
    size_t place;
    void*& address;
    const Tensor& like;
  };

  // Runs the kernels that compute both products; false if they decline.
  bool by_product() {
    const auto& product = kernels_.product;
    const Tensor& x = t_[X];
    if (!product.plan_backward || t_.count() > 1 || t_.has(Form::GROUPS) || dnorm_.defined() ||
        !dhs_[0].defined() || t_.is_narrow() || !t_.weight(0).is_contiguous() ||
        (spec_.invariant && !x.is_cpu())) {
      return false;
    }
    auto call = norm_call(spec_, t_, extent_, product.context);
    call.in_graph = kernels_.is_captured;
    call.N = extent_.N;
    call.weight = address(t_.weight(0));
    call.dy = address(dhs_[0]);
    call.dsum = address(dsum_);
    const std::array<Wish, 5> results{{
        {X, call.dx, x},
        {GAMMA, call.dgamma, t_[GAMMA]},
        {BETA, call.dbeta, t_[BETA]},
        {NAMED, call.dweight, t_.weight(0)},
        {NAMED + 1, call.dbias, t_.weight(0)}}};
    bool is_wanted = false;
    const bool is_added = wanted_[NAMED] && main_grads_[0].defined();
    const bool accumulates = is_added && !x.is_cpu();
    for (const auto& [place, address, like] : results) {
      if (!wanted_[place] || found(place).defined()) continue;
      // CPU kernels round a weight's gradient to its dtype.
      if (place == NAMED && is_added && !accumulates) continue;
      address = WANTED;
      is_wanted = true;
    }
    if (accumulates) {
      if (!main_grads_[0].is_contiguous() || main_grads_[0].dtype() != FLOAT32) return false;
      call.accumulate = true;
      call.dweight = address(main_grads_[0]);
    }
    if (is_wanted && !by_product(call, results, accumulates)) return false;
    if (is_added && !accumulates) {
      found(NAMED) = dhs_[0];
      result_.z = normalized(spec_, t_, extent_, kernels_).rows();
    }
    return true;
  }

  bool by_product(Call& call, const std::array<Wish, 5>& results, bool accumulates) {
    const auto& product = kernels_.product;
    const Tensor& x = t_[X];
    call.strategy = product.strategy;
    if (x.is_cpu() && !call.strategy && !spec_.invariant) {
      call.strategy = Costs(product.costs).fastest(call, call.N, true);
    }
    if (x.is_cpu() && call.strategy == AROUND_PRODUCTS) return false;
    if (product.plan_backward(&call) != 0 || call.strategy != FUSED) return false;
    for (const auto& [place, address, like] : results) {
      if (!address || (accumulates && place == NAMED)) continue;
      const auto shape = like.sizes();
      found(place) = empty(place == NAMED + 1 ? shape.first(1) : shape, like);
      address = found(place).data();
    }
    // The kernel adds what it writes in float32 to both.
    Tensor dbias;
    if (accumulates && call.dbias) {
      dbias = empty(Shape{extent_.N}, x, FLOAT32);
      check(aoti_torch_zero_(dbias.get()), "zero_");
      call.dbias = address(dbias);
    }
    const auto workspace = workspace_of(call, x);
    launch(product.backward, call, x);
    if (dbias.defined()) copy(found(NAMED + 1), dbias);
    return true;
  }

  void around_products() {
    const Tensor& x = t_[X];
    const ProductGradients dhs(dhs_, t_);
    Tensor z = passed_rows();
    const bool is_passed = z.defined();
    Tensor dz = wants_norm_ && !is_passed ? gradient_of_norm(dhs) : Tensor();
    if (wants_weight_ && !is_passed) {
      // The pass over x recomputes the normalized rows into dz, which nothing else needs by then.
      const bool may_replace = dz.defined() && !dz.is_same(dnorm_) && !t_.is_narrow();
      z = may_replace ? dz : empty(Shape{extent_.M, extent_.K}, x, t_.product_dtype());
    }
    const bool passes = !is_passed && (dz.defined() || z.defined());
    ParameterGradients parameters(spec_, t_, dhs, wanted_, main_grads_, homes_, kernels_, result_);
    const Tensor dbias = parameters.plan(z, passes);
    if (passes) norm_backward(dz, z, dbias);
    parameters.run();
  }

  // The normalized rows if one kernel computes the gradients of several weights and passes over their
  // rows, and so computes the norm's gradients; otherwise undefined.
  Tensor passed_rows() {
    const Tensor& x = t_[X];
    Group parts;
    auto call = planned_rows(parts, dhs_);
    if (!call) return {};
    allocate_results(*call);
    const auto z = empty(Shape{extent_.M, extent_.K}, x);
    call->dz = address(z);
    const auto workspace = workspace_of(*call, x);
    launch(kernels_.product.passed_rows, *call, x);
    return z;
  }

  // The record of that kernel; nothing if there is none, or its plan declines.
  std::optional<Call> planned_rows(Group& parts, const Tensors& dys) const {
    const auto& product = kernels_.product;
    if (!product.passed_rows || t_.count() == 1 || !wanted_[X] || !wants_weight_ ||
        spec_.invariant || t_.is_narrow() || t_.has(Form::GROUPS) || dnorm_.defined()) {
      return std::nullopt;
    }
    auto call = norm_call(spec_, t_, extent_, product.context);
    call.in_graph = kernels_.is_captured;
    if (!give_gradients(call, parts, dys, t_)) return std::nullopt;
    call.dx = WANTED;
    call.dsum = address(dsum_);
    if (product.plan_passed_rows(&call) != 0 || call.strategy == DECLINED) return std::nullopt;
    return call;
  }

  // The gradient of the normalized rows, in the dtype of x.
  Tensor gradient_of_norm(const ProductGradients& dhs) const {
    Tensor dz = dnorm_;
    if (!dz.defined() && !t_.is_narrow() && !spec_.invariant) {
      dz = grouped_input_gradients(dhs_, t_, extent_, kernels_);
      if (dz.defined()) return dz;
    }
    for (size_t i = 0; i < t_.count(); ++i) {
      if (!dhs[i].defined()) continue;
      const Tensor& dh = spec_.invariant ? dhs[i] : dhs.whole(i);
      const Tensor weight = with_whole_rows(t_.weight(i), dh.size(1));
      if (t_.is_narrow() || spec_.invariant || !dz.defined()) {
        auto product = t_.is_narrow() && !spec_.invariant
            ? widened_product(dh, weight, t_[X].dtype())
            : input_gradient(dh, weight, spec_.invariant, kernels_);
        if (product.dtype() != t_[X].dtype()) {
          const auto wide = empty(product.sizes(), product, t_[X].dtype());
          copy(wide, product);
          product = wide;
        }
        if (!dz.defined()) {
          dz = product;
          continue;
        }
        add(product, dz, kernels_.norm_passes);
        dz = product;
      } else {
        // Not in place if the caller holds this tensor.
        const auto sum = dz.is_same(dnorm_) ? empty_like(dz) : dz;
        addmm(sum, dz, dh, weight);
        dz = sum;
      }
    }
    return dz;
  }

  // Gives a record memory for the gradients of x and of the norm's operands.
  void allocate_results(Call& call) {
    const auto allocate = [&](Place place, void* Call::*gradient) {
      if (!wanted_[place] || !t_[place].defined()) return;
      found(place) = empty_like(t_[place]);
      call.*gradient = found(place).data();
    };
    allocate(X, &Call::dx);
    for (const auto& o : NORM_OPERANDS) {
      if (o.gradient) allocate(o.place, o.gradient);
    }
  }

  void norm_backward(const Tensor& dz, const Tensor& z, const Tensor& dbias) {
    const auto& passes = kernels_.norm_passes;
    auto call = norm_call(spec_, t_, extent_, passes.context);
    call.dz = address(dz);
    call.dsum = address(dsum_);
    call.z = address(z);
    const Tensor dy = dbias.defined() ? dense(dhs_[0]) : Tensor();
    if (dbias.defined()) {
      call.N = extent_.N;
      call.dy = address(dy);
      call.dbias = address(dbias);
    }
    if (dz.defined()) allocate_results(call);
    fused_norm::run(passes.plan_normalize_backward, passes.normalize_backward, call, t_[X]);
  }

  const Spec& spec_;
  const Operands& t_;
  const Extent& extent_;
  Tensors products_, main_grads_;
  const Wanted& wanted_;
  const Kernels& kernels_;
  Gradients result_;
  Tensors das_, dhs_, dbiases_, homes_;
  Tensor dsum_, dnorm_, a_;
  bool wants_norm_ = false, wants_weight_ = false, wants_bias_ = false;
};

}  // namespace fused_norm
