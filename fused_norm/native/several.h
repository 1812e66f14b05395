// Several Linear layers on the same rows, q, k and v or gate and up, by Hopper's launches for all of
// them: backends/several.py in C++.

#pragma once

#include <array>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "seam.h"

namespace fused_norm {

// Their halves of a record, which points to them.
class Parts {
 public:
  Parts(Call& call, const Operands& t) {
    call.parts = parts_.data();
    for (size_t i = 0; i < t.count(); ++i) add(call, t.weight(i)).bias = address(t.bias(i));
  }
  explicit Parts(Call& call) {
    call.parts = parts_.data();
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  Part& add(Call& call, const Tensor& weight) {
    auto& part = parts_[call.part_count++];
    part.N = weight.size(0);
    part.weight = address(weight);
    return part;
  }
  Part& operator[](size_t i) {
    return parts_[i];
  }

 private:
  std::array<Part, MOST_PARTS> parts_{};
};

inline bool are_several(const Operands& t) {
  return t.count() > 1 && static_cast<int64_t>(t.count()) <= MOST_PARTS;
}

// The products of dense rows and each weight, or all side by side in one tensor; none where the
// plan declines.
inline Tensors several_products(
    const Seam& kind, const Tensor& z, const Operands& t, const Sizes& sizes,
    const Product& product) {
  if (!product.products || !are_several(t)) return {};
  auto call = rows_call(sizes.M, sizes.N, product.context);
  call.K = sizes.K;
  call.z = address(z);
  call.pitch = kind.is_joined ? sizes.N : 0;
  Parts parts(call, t);
  if (product.plan_products(&call) != 0 || call.way == DECLINED) return {};
  // The kernel adds a bias everywhere or nowhere.
  bool has_bias = false;
  for (size_t i = 0; i < t.count(); ++i) has_bias = has_bias || t.bias(i).defined();
  Tensors zeros, outputs;
  if (kind.is_joined) outputs.push_back(empty_rows(z, sizes.N));
  int64_t first = 0;
  for (size_t i = 0; i < t.count(); ++i) {
    if (has_bias && !t.bias(i).defined()) {
      zeros.push_back(at::zeros({parts[i].N}, z.options()));
      parts[i].bias = address(zeros.back());
    }
    if (kind.is_joined) {
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

// Gives a record what dz, the sum of dy weight over all pairs, is made of; false where there is no
// kernel for that. Each dy is dense, or they lie side by side in one tensor.
inline bool give_gradients(Call& call, Parts& parts, const Tensors& dys, const Operands& t) {
  if (!are_several(t)) return false;
  bool are_dense = true;
  for (size_t i = 0; i < t.count(); ++i) {
    if (!dys[i].defined()) continue;
    are_dense = are_dense && dys[i].is_contiguous();
    call.N += t.weight(i).size(0);
    call.pitch = dys[i].stride(0);
    parts.add(call, t.weight(i)).dy = address(dys[i]);
  }
  if (are_dense) call.pitch = 0;
  for (const auto& dy : dys) {
    if (!are_dense && dy.defined() && (dy.stride(0) != call.pitch || dy.stride(1) != 1)) {
      return false;
    }
  }
  return call.part_count > 1;
}

// That sum; undefined where the plan declines.
inline Tensor several_input_gradients(
    const Tensors& dys, const Operands& t, const Sizes& sizes, const Product& product) {
  if (!product.input_gradients) return {};
  auto call = rows_call(sizes.M, 0, product.context);
  call.K = sizes.K;
  Parts parts(call);
  if (!give_gradients(call, parts, dys, t) || product.plan_input_gradients(&call) != 0 ||
      call.way == DECLINED) {
    return {};
  }
  const auto dz = empty({sizes.M, sizes.K}, t[X]);
  call.dz = address(dz);
  launch(product.input_gradients, call, dz);
  return dz;
}

// The product dW = dy^T z of one of several weights, which brings db along; nothing where its plan
// declines. z may be written after this.
inline std::optional<Call> several_weight_gradient(
    const Tensor& dy, const Tensor& z, const Product& product) {
  if (!product.weight_gradient || !dy.is_contiguous()) return std::nullopt;
  auto call = rows_call(z.size(0), dy.size(1), product.context);
  call.K = z.size(1);
  call.dy = address(dy);
  call.z = address(z);
  if (product.plan_weight_gradient(&call) != 0 || call.way == DECLINED) return std::nullopt;
  return call;
}

}  // namespace fused_norm
