// Several Linear layers on the same rows (q, k and v, or gate and up) in one launch.

#pragma once

#include "linear.h"

namespace fused_norm {

// The `Part`s of a record, which points to them.
class Group {
 public:
  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Gives a record all weights with their biases.
  void give(Call& call, const Operands& t) {
    for (size_t i = 0; i < t.count(); ++i) add(call, t.weight(i)).bias = address(t.bias(i));
  }
  Part& add(Call& call, const Tensor& weight) {
    call.parts = parts_.data();
    auto& part = parts_[static_cast<size_t>(call.part_count++)];
    part.N = weight.size(0);
    part.weight = address(weight);
    return part;
  }
  Part& operator[](size_t i) { return parts_[i]; }

 private:
  std::array<Part, MOST_PARTS> parts_{};
};

inline bool is_grouped(const Operands& t) {
  return t.count() > 1 && static_cast<int64_t>(t.count()) <= MOST_PARTS && t.are_weights_dense();
}

// The products of dense rows and each weight, or all concatenated in one tensor; none if the plan
// declines.
inline Tensors grouped_products(
    const Spec& spec, const Tensor& z, const Operands& t, const Extent& extent,
    const Kernels& kernels) {
  const auto& product = kernels.product;
  if (!product.products || spec.invariant || !is_grouped(t)) return {};
  auto call = rows_call(extent.M, extent.N, product.context);
  call.K = extent.K;
  call.z = address(z);
  call.in_graph = kernels.is_captured;
  call.pitch = spec.is_joined ? extent.N : 0;
  Group parts;
  parts.give(call, t);
  if (product.plan_products(&call) != 0 || call.strategy == DECLINED) return {};
  // The kernel adds a bias to all products or to none.
  bool has_bias = false;
  for (size_t i = 0; i < t.count(); ++i) has_bias = has_bias || t.bias(i).defined();
  Tensors added, outputs;
  if (spec.is_joined) outputs.push_back(empty_rows(z, extent.N));
  int64_t first = 0;
  for (size_t i = 0; i < t.count(); ++i) {
    if (has_bias && !t.bias(i).defined()) {
      added.push_back(zeros(Shape{parts[i].N}, z, z.dtype()));
      parts[i].bias = address(added.back());
    }
    if (spec.is_joined) {
      parts[i].y = static_cast<char*>(address(outputs[0])) + first * z.element_size();
      first += parts[i].N;
    } else {
      outputs.push_back(empty_rows(z, parts[i].N));
      parts[i].y = address(outputs.back());
    }
  }
  launch(product.products, call, z);
  return outputs;
}

// Gives a record the factors of dz, the sum of dy weight over all pairs; false if there is no kernel
// for it. Each dy is dense, or they are columns of one tensor.
inline bool give_gradients(Call& call, Group& parts, const Tensors& dys, const Operands& t) {
  if (!is_grouped(t)) return false;
  bool are_dense = true;
  for (size_t i = 0; i < t.count(); ++i) {
    if (!dys[i].defined()) continue;
    are_dense = are_dense && dys[i].is_contiguous();
    call.N += t.weight(i).size(0);
    call.pitch = dys[i].strides()[0];
    parts.add(call, t.weight(i)).dy = address(dys[i]);
  }
  if (are_dense) call.pitch = 0;
  for (const auto& dy : dys) {
    if (are_dense || !dy.defined()) continue;
    if (dy.strides()[0] != call.pitch || dy.strides()[1] != 1) return false;
  }
  return call.part_count > 1;
}

// The record of that sum, of the parts in `parts`; nothing if the plan declines.
inline std::optional<Call> planned_input_gradients(
    Group& parts, const Tensors& dys, const Operands& t, const Extent& extent,
    const Kernels& kernels) {
  const auto& product = kernels.product;
  if (!product.input_gradients) return std::nullopt;
  auto call = rows_call(extent.M, 0, product.context);
  call.K = extent.K;
  call.in_graph = kernels.is_captured;
  if (!give_gradients(call, parts, dys, t) || product.plan_input_gradients(&call) != 0 ||
      call.strategy == DECLINED) {
    return std::nullopt;
  }
  return call;
}

// That sum; none if the plan declines.
inline Tensor grouped_input_gradients(
    const Tensors& dys, const Operands& t, const Extent& extent, const Kernels& kernels) {
  Group parts;
  auto call = planned_input_gradients(parts, dys, t, extent, kernels);
  if (!call) return {};
  const auto dz = empty(Shape{extent.M, extent.K}, t[X]);
  call->dz = address(dz);
  launch(kernels.product.input_gradients, *call, dz);
  return dz;
}

}  // namespace fused_norm
