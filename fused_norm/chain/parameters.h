// The gradients of weights and biases, from the normalized rows: of all in one launch, of each by a kernel,
// or by PyTorch's products.

#pragma once

#include "grouped.h"

namespace fused_norm {

// Which gradients are wanted, by place; at X also that of the residual.
using Wanted = std::vector<uint8_t>;

// Gradients by place. For a weight with a `main_grad`: none if a kernel has added to it, otherwise the
// gradient of its product, to be multiplied by the normalized rows, which are then in z.
struct Gradients {
  Tensors found;
  Tensor z;
};

// The gradients of products. Both must outlive it.
class ProductGradients {
 public:
  ProductGradients(const Tensors& dhs, const Operands& t) : dhs_(dhs), t_(t), whole_(dhs.size()) {}

  const Tensor& operator[](size_t i) const { return dhs_[i]; }
  // The same for PyTorch's products.
  const Tensor& whole(size_t i) const {
    if (!whole_[i].defined()) whole_[i] = with_whole_columns(dhs_[i], t_.weight(i));
    return whole_[i];
  }

 private:
  const Tensors& dhs_;
  const Operands& t_;
  mutable Tensors whole_;
};

// Plans and computes them. What it is made of must outlive it.
class ParameterGradients {
 public:
  // `main_grads` has a tensor for each weight, and `homes` memory for gradients by place, all of which may be
  // undefined. Biases whose gradients are in `result` have theirs.
  ParameterGradients(
      const Spec& spec, const Operands& t, const ProductGradients& dhs, const Wanted& wanted,
      const Tensors& main_grads, const Tensors& homes, const Kernels& kernels, Gradients& result)
      : spec_(spec), t_(t), dhs_(dhs), wanted_(wanted), main_grads_(main_grads), homes_(homes),
        kernels_(kernels), result_(result), by_kernel_(t.count()) {}

  // Plans products with rows, which may be overwritten after this, and computes the gradients of biases that
  // come with none of them. Returns memory for that of the only bias if `passes`, since a pass over the rows
  // then computes it; otherwise an undefined tensor.
  Tensor plan(const Tensor& z, bool passes) {
    z_ = z;
    together_ = planned_together();
    if (together_) return {};
    Tensor by_pass;
    for (size_t i = 0; i < t_.count(); ++i) {
      Tensor& dbias = found(bias(i));
      const bool wants_bias = wanted_[bias(i)] && !dbias.defined() && dhs_[i].defined();
      if (!spec_.invariant && !main_grads_[i].defined() && wanted_[weight(i)] && dhs_[i].defined()) {
        by_kernel_[i] =
            planned_weight_gradient(dhs_[i], z, t_.weight(i), wants_bias, kernels_.product);
      }
      if (!wants_bias) continue;
      if (by_kernel_[i]) {
        dbias = allocated(bias(i), Shape{dhs_[i].size(1)}, dhs_[i]);
        by_kernel_[i]->dbias = address(dbias);
      } else if (t_.count() == 1 && passes) {
        by_pass = dbias = empty(Shape{dhs_[i].size(1)}, dhs_[i]);
      } else {
        dbias = sum_of_rows(dense(dhs_[i]), kernels_.passes, homes_[bias(i)]);
      }
    }
    return by_pass;
  }

  // Computes what is planned, from the rows that were given then.
  void run() {
    if (together_) return run_together();
    for (size_t i = 0; i < t_.count(); ++i) {
      if (!wanted_[weight(i)]) continue;
      if (auto& call = by_kernel_[i]) {
        found(weight(i)) =
            weight_gradient(*call, t_.weight(i), kernels_.product, homes_[weight(i)]);
      } else if (main_grads_[i].defined()) {
        found(weight(i)) = dhs_[i];
        result_.z = z_;
      } else {
        found(weight(i)) =
            weight_gradient_by_pytorch(dhs_.whole(i), z_, t_.weight(i), homes_[weight(i)]);
      }
    }
  }

 private:
  static size_t weight(size_t i) { return NAMED + i; }
  size_t bias(size_t i) const { return NAMED + t_.count() + i; }
  Tensor& found(size_t place) { return result_.found[place]; }
  Tensor allocated(size_t place, Sizes sizes, const Tensor& like) const {
    return homes_[place].defined() ? homes_[place] : empty(sizes, like);
  }

  // The record of one product for the gradients of all weights and biases; nothing if there is none, or its
  // plan declines.
  std::optional<Call> planned_together() {
    const auto& product = kernels_.product;
    if (!product.weight_gradient || spec_.invariant || !z_.defined() || !is_grouped(t_)) {
      return std::nullopt;
    }
    auto call = rows_call(z_.size(0), 0, product.context);
    call.K = z_.size(1);
    call.z = address(z_);
    for (size_t i = 0; i < t_.count(); ++i) {
      const Tensor& dy = dhs_[i];
      if (!wanted_[weight(i)] || main_grads_[i].defined() || !dy.defined() || !dy.is_contiguous() ||
          dy.size(1) != t_.weight(i).size(0)) {
        return std::nullopt;
      }
      auto& part = parts_.add(call, t_.weight(i));
      part.dy = address(dy);
      if (wanted_[bias(i)] && !found(bias(i)).defined()) part.bias = WANTED;
      call.N += part.N;
    }
    if (product.plan_weight_gradient(&call) != 0 || call.strategy == DECLINED) return std::nullopt;
    return call;
  }

  void run_together() {
    for (size_t i = 0; i < t_.count(); ++i) {
      auto& part = parts_[i];
      found(weight(i)) = allocated(weight(i), t_.weight(i).sizes(), t_.weight(i));
      part.y = address(found(weight(i)));
      if (!part.bias) continue;
      found(bias(i)) = allocated(bias(i), Shape{part.N}, dhs_[i]);
      part.bias = address(found(bias(i)));
    }
    launch(kernels_.product.weight_gradient, *together_, t_[X]);
  }

  const Spec& spec_;
  const Operands& t_;
  const ProductGradients& dhs_;
  const Wanted& wanted_;
  const Tensors &main_grads_, &homes_;
  const Kernels& kernels_;
  Gradients& result_;
  Tensor z_;
  Group parts_;
  std::optional<Call> together_;
  std::vector<std::optional<Call>> by_kernel_;
};

}  // namespace fused_norm
