// The backward of a call of the op family: one native call where the kernels have it, else passes
// over rows around PyTorch's products.

#pragma once

#include <optional>

#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>

#include "seam_forward.h"

namespace fused_norm {

// Which gradients are wanted, by place; that of x stands for the residual's, too.
using Wanted = c10::SmallVector<bool, 16>;

// Whether a gradient of a result but the sum's is there.
inline bool reaches_norm(const Seam& kind, at::ArrayRef<Tensor> gradients) {
  const size_t sum = kind.returns_sum ? gradients.size() - 1 - kind.returns_norm : gradients.size();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (i != sum && gradients[i].defined()) return true;
  }
  return false;
}

// Which tensors have a gradient, by place: `reached` in composition.py.
inline Wanted reached(const Seam& kind, size_t count, at::ArrayRef<Tensor> gradients) {
  const size_t outputs = gradients.size() - kind.returns_sum - kind.returns_norm;
  const bool total = kind.returns_sum && gradients[outputs].defined();
  const bool norm = reaches_norm(kind, gradients);
  const bool through = std::any_of(
      gradients.begin(), gradients.begin() + outputs, [](const Tensor& g) { return g.defined(); });
  Wanted places(NAMED + 2 * count, through);
  for (const auto& o : OF_NORM) {
    places[o.place] = is_summand(o.place) ? total || norm : o.gradient && norm;
  }
  places[X] = total || norm;
  for (size_t i = 0; outputs == count && i < count; ++i) {
    places[NAMED + i] = places[NAMED + count + i] = gradients[i].defined();
  }
  return places;
}

// Computes gradients by place, once. Those of the residuals are those of x and of the output.
class Backward {
 public:
  // x is the sum where there was a residual. `grads` are those of the outputs, the sum and the
  // normalized rows as far as these are results, in dense memory. Wanted are those that more than
  // the sum's reaches.
  Backward(
      const Seam& kind, const Operands& t, const Sizes& sizes, const Tensors& products,
      const Tensors& grads, const Wanted& wanted, const Kernels& kernels)
      : kind_(kind), t_(t), sizes_(sizes), products_(products), wanted_(wanted),
        kernels_(kernels), found_(t.flat.size()) {
    size_t outputs = grads.size() - kind.returns_sum - kind.returns_norm;
    for (size_t i = 0; i < outputs; ++i) {
      das_.push_back(grads[i].defined() ? as_rows(grads[i]) : Tensor());
    }
    if (kind.returns_sum) dsum_ = grads[outputs++];
    if (kind.returns_norm && grads[outputs].defined()) dnorm_ = as_rows(grads[outputs]);
    wants_norm_ = std::any_of(&wanted[X], &wanted[MEAN], [](bool w) { return w; });
    wants_weight_ = any(NAMED);
    wants_bias_ = any(NAMED + t.count());
  }

  Tensors run() {
    if (kind_.activation && products_.empty()) {
      const auto z = normalized(kind_, t_, sizes_, kernels_.passes);
      products_ = products_of(kind_, z, t_, sizes_, kernels_.product);
    }
    const Tensor dout = t_[OUT_WEIGHT].defined() ? second_linear() : Tensor();
    before_activation();
    if (dout.defined()) second_parameters(dout);
    if (!by_product()) around_products();
    return std::move(found_);
  }

 private:
  bool any(size_t first) const {
    return std::any_of(&wanted_[first], &wanted_[first] + t_.count(), [](bool w) { return w; });
  }

  void activate_backward(Call& call) const {
    fused_norm::run(
        kernels_.passes.plan_activate_backward, kernels_.passes.activate_backward, call, t_[X]);
  }

  Tensor sum_of_rows(const Tensor& rows) const {
    const auto sum = empty({rows.size(1)}, rows);
    auto call = rows_call(sizes_.M, rows.size(1), kernels_.passes.context);
    call.da = address(rows);
    call.dbias = address(sum);
    activate_backward(call);
    return sum;
  }

  // Puts the gradient of the activation in the place of the output's, and returns that.
  Tensor second_linear() {
    const Tensor dout = das_[0];
    das_[0] = Tensor();
    if (dout.defined() && (wants_norm_ || wants_weight_ || wants_bias_)) {
      das_[0] = input_gradient(dout, t_[OUT_WEIGHT], kernels_.product);
    }
    return dout;
  }

  // Finds the gradients of the second Linear layer's parameters.
  void second_parameters(const Tensor& dout) {
    auto& dbias = found_[OUT_BIAS];
    if (wanted_[OUT_WEIGHT]) {
      if (!a_written_) a_ = as_rows(activated(kind_, products_[0], kernels_.passes));
      found_[OUT_WEIGHT] = weight_gradient(
          dout, a_, t_[OUT_WEIGHT], wanted_[OUT_BIAS], dbias, kernels_.product);
    }
    if (wanted_[OUT_BIAS] && !dbias.defined()) dbias = sum_of_rows(dout);
  }

  // Finds the gradient of each product, and of each bias where the kernels after it do not.
  void before_activation() {
    const auto count = t_.count();
    for (size_t i = 0; i < das_.size(); ++i) {
      const Tensor& da = das_[i];
      const bool wants_bias = kind_.is_joined ? wants_bias_ : wanted_[NAMED + count + i];
      dbiases_.push_back(Tensor());
      if (!da.defined() || !kind_.activation || !(wants_norm_ || wants_weight_ || wants_bias)) {
        if (da.defined() && das_.size() < count && wants_bias) dbiases_[i] = sum_of_rows(da);
        dhs_.push_back(da);
        continue;
      }
      const auto h = as_rows(products_[i]);
      const auto dh = empty(h.sizes(), h);
      const auto dbias = wants_bias ? empty({h.size(1)}, h) : Tensor();
      auto call = rows_call(sizes_.M, da.size(1), kernels_.passes.context);
      call.activation = kind_.activation;
      call.da = address(da);
      call.h = address(h);
      call.dh = address(dh);
      call.dbias = address(dbias);
      if (t_[OUT_WEIGHT].defined() && wanted_[OUT_WEIGHT]) {
        a_ = empty(da.sizes(), da);
        call.a = address(a_);
        a_written_ = true;
      }
      activate_backward(call);
      dhs_.push_back(dh);
      dbiases_[i] = dbias;
    }
    if (kind_.is_joined && count > 1) split();
    for (size_t i = 0; i < dbiases_.size(); ++i) {
      if (wanted_[NAMED + count + i]) found_[NAMED + count + i] = dbiases_[i];
    }
  }

  // Gives each weight its part of what lies side by side.
  void split() {
    const Tensor dh = dhs_[0], dbias = dbiases_[0];
    dhs_.clear();
    dbiases_.clear();
    int64_t first = 0;
    for (size_t i = 0; i < t_.count(); ++i) {
      const auto N = t_.weight(i).size(0);
      dhs_.push_back(dh.defined() ? dh.narrow(1, first, N) : Tensor());
      // Each has memory of its own, so that whoever keeps one keeps no more.
      dbiases_.push_back(dbias.defined() ? dbias.narrow(0, first, N).clone() : Tensor());
      first += N;
    }
  }

  // Runs the kernels that have both products; false where they decline.
  bool by_product() {
    const auto& product = kernels_.product;
    if (!product.plan_backward || t_.count() > 1 || t_.has(Form::GROUPS) || dnorm_.defined() ||
        !dhs_[0].defined()) {
      return false;
    }
    auto call = norm_call(kind_, t_, sizes_, product.context);
    call.N = sizes_.N;
    call.weight = address(t_.weight(0));
    call.dy = address(dhs_[0]);
    call.dsum = address(dsum_);
    struct Result {
      size_t place;
      void*& address;
      const Tensor& like;
    };
    const Result results[] = {
        {X, call.dx, t_[X]},
        {GAMMA, call.dgamma, t_[GAMMA]},
        {BETA, call.dbeta, t_[BETA]},
        {NAMED, call.dweight, t_.weight(0)},
        {NAMED + 1, call.dbias, t_.weight(0)}};
    bool is_wanted = false;
    for (const auto& [place, address, like] : results) {
      if (!wanted_[place] || found_[place].defined()) continue;
      address = WANTED;
      is_wanted = true;
    }
    if (!is_wanted) return true;
    call.way = product.way;
    if (product.plan_backward(&call) != 0 || call.way != FUSED) return false;
    for (const auto& [place, address, like] : results) {
      if (!address) continue;
      const auto shape = like.sizes();
      found_[place] = empty(place == NAMED + 1 ? shape.slice(0, 1) : shape, like);
      address = found_[place].data_ptr();
    }
    const auto workspace = workspace_of(call, t_[X]);
    launch(product.backward, call, t_[X]);
    return true;
  }

  void around_products() {
    const Tensor& x = t_[X];
    const auto count = t_.count();
    Tensor z = passed_rows();
    const bool is_passed = z.defined();
    Tensor dz = wants_norm_ && !is_passed ? gradient_of_norm() : Tensor();
    if (wants_weight_ && !is_passed) {
      // The pass over x writes the normalized rows again, over dz: it is the last to need that.
      const bool may_replace = dz.defined() && !dz.is_same(dnorm_);
      z = may_replace ? dz : empty({sizes_.M, sizes_.K}, x);
    }
    // The products that find gradients of weights and, on their way, of their biases.
    c10::SmallVector<std::optional<Call>, MOST_PARTS> by_kernel(count);
    for (size_t i = 0; i < count; ++i) {
      if (!wanted_[NAMED + i] || !dhs_[i].defined()) continue;
      by_kernel[i] = planned_weight_gradient(dhs_[i], z, kernels_.product);
    }
    // Gradients of other biases that no activation has found: one on the way, several one by one.
    Tensor sum;
    for (size_t i = 0; i < count; ++i) {
      auto& dbias = found_[NAMED + count + i];
      if (!wanted_[NAMED + count + i] || dbias.defined() || !dhs_[i].defined()) continue;
      if (by_kernel[i]) {
        dbias = empty({dhs_[i].size(1)}, x);
        by_kernel[i]->dbias = address(dbias);
      } else if (count == 1 && (dz.defined() || z.defined())) {
        sum = dbias = empty({sizes_.N}, x);
      } else {
        dbias = sum_of_rows(dhs_[i]);
      }
    }
    if (!is_passed && (dz.defined() || z.defined())) norm_backward(dz, z, sum);
    for (size_t i = 0; i < count; ++i) {
      if (!wanted_[NAMED + i]) continue;
      if (auto& call = by_kernel[i]) {
        found_[NAMED + i] = weight_gradient(*call, t_.weight(i), kernels_.product);
        continue;
      }
      found_[NAMED + i] = at::mm(dhs_[i].t(), z);
    }
  }

  // The normalized rows where one kernel adds up the gradients of several weights' rows and passes
  // over them, which finds those of the norm; undefined elsewhere.
  Tensor passed_rows() {
    const auto& product = kernels_.product;
    const Tensor& x = t_[X];
    if (!product.passed_rows || t_.count() == 1 || !wanted_[X] || !wants_weight_ ||
        t_.has(Form::GROUPS) || dnorm_.defined()) {
      return {};
    }
    auto call = norm_call(kind_, t_, sizes_, product.context);
    Parts parts(call);
    if (!give_gradients(call, parts, dhs_, t_)) return {};
    call.dx = WANTED;
    call.dsum = address(dsum_);
    if (product.plan_passed_rows(&call) != 0 || call.way == DECLINED) return {};
    find_results(call);
    const auto z = empty({sizes_.M, sizes_.K}, x);
    call.dz = address(z);
    const auto workspace = workspace_of(call, x);
    launch(product.passed_rows, call, x);
    return z;
  }

  Tensor gradient_of_norm() const {
    Tensor dz = dnorm_;
    if (!dz.defined()) dz = several_input_gradients(dhs_, t_, sizes_, kernels_.product);
    if (dz.defined() && !dnorm_.defined()) return dz;
    for (size_t i = 0; i < t_.count(); ++i) {
      const Tensor& dh = dhs_[i];
      if (!dh.defined()) continue;
      if (!dz.defined()) {
        dz = input_gradient(dh, t_.weight(i), kernels_.product);
      } else if (dz.is_same(dnorm_)) {
        dz = at::addmm(dz, dh, t_.weight(i));
      } else {
        at::addmm_out(dz, dz, dh, t_.weight(i));
      }
    }
    return dz;
  }

  // Gives a record memory for the gradients of x and of what comes with the norm.
  void find_results(Call& call) {
    const auto find = [&](Place place, void* Call::*gradient) {
      if (!wanted_[place]) return;
      found_[place] = empty(t_[place].sizes(), t_[place]);
      call.*gradient = found_[place].data_ptr();
    };
    find(X, &Call::dx);
    for (const auto& o : OF_NORM) {
      if (o.gradient) find(o.place, o.gradient);
    }
  }

  void norm_backward(const Tensor& dz, const Tensor& z, const Tensor& dbias) {
    auto call = norm_call(kind_, t_, sizes_, kernels_.passes.context);
    call.dz = address(dz);
    call.dsum = address(dsum_);
    call.z = address(z);
    if (dbias.defined()) {
      call.N = sizes_.N;
      call.dy = address(dhs_[0]);
      call.dbias = address(dbias);
    }
    if (dz.defined()) find_results(call);
    fused_norm::run(
        kernels_.passes.plan_normalize_backward, kernels_.passes.normalize_backward, call, t_[X]);
  }

  const Seam& kind_;
  const Operands& t_;
  const Sizes& sizes_;
  Tensors products_;
  const Wanted& wanted_;
  const Kernels& kernels_;
  Tensors found_, das_, dhs_, dbiases_;
  Tensor dsum_, dnorm_, a_;
  bool wants_norm_ = false, wants_weight_ = false, wants_bias_ = false, a_written_ = false;
};

// The gradients of a call by place; nothing where its tensors are not such as kernels take.
inline std::optional<Tensors> gradients_of(
    const Seam& kind, const Operands& t, const Tensors& products, at::ArrayRef<Tensor> gradients,
    const Wanted& wanted, const Kernels& kernels) {
  // Tensors may have been given other memory since the forward, by an assignment to their `data`.
  const auto sizes = sizes_of(kind, t);
  if (!sizes) return std::nullopt;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor& x = t[X];
  const Plain is_plain(x);
  for (const auto& h : products) {
    if (!is_plain.is(h)) return std::nullopt;
  }
  Tensors grads;
  for (const auto& grad : gradients) {
    if (grad.defined() && (!is_plain.is_kind(grad) || grad.scalar_type() != x.scalar_type())) {
      return std::nullopt;
    }
    grads.push_back(grad.defined() ? grad.contiguous() : grad);
  }
  auto found = Backward(kind, t, *sizes, products, grads, wanted, kernels).run();
  if (!kind.returns_sum || !found[X].defined()) return found;
  // Autograd would add the gradient of the norm to that of the sum.
  const Tensor& dsum = gradients[gradients.size() - 1 - kind.returns_norm];
  if (!dsum.defined() || dsum.is_contiguous()) return found;
  // Without values, an op gives a layout alone.
  const auto bare = [&](const Tensor& v) {
    return at::empty_strided(v.sizes(), v.strides(), v.options().device(at::kMeta));
  };
  const auto total = at::add(bare(dsum), bare(found[X]));
  if (total.strides() != found[X].strides()) {
    found[X] = at::empty_strided(total.sizes(), total.strides(), x.options()).copy_(found[X]);
  }
  return found;
}

}  // namespace fused_norm
