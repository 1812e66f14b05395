// The gradients of a call, of one Linear layer also from gradients of parts of its output.

#pragma once

#include "backward.h"

namespace fused_norm {

// A Linear layer as several on the same rows: each has the rows of the weight for the columns that one of
// several gradients is of. Their gradients are rows of that of the weight.
class Columns {
 public:
  Columns(const Operands& whole, const Wanted& wanted, const Tensors& dys)
      : t(dys.size()), wanted(NAMED + 2 * dys.size()), homes(this->wanted.size()) {
    const auto count = dys.size();
    const Tensor& weight = whole.weight(0);
    const auto N = weight.size(0), K = weight.size(1);
    std::copy_n(whole.flat.begin(), NAMED, t.flat.begin());
    std::copy_n(wanted.begin(), NAMED, this->wanted.begin());
    if (wanted[NAMED]) dweight_ = empty_like(weight);
    if (wanted[NAMED + 1]) dbias_ = empty(Shape{N}, weight);
    const Shape strides{K, 1};
    int64_t first = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto size = dys[i].size(-1);
      const auto rows_of = [&](const Tensor& all) {
        return all.viewed(Shape{size, K}, strides, first * K);
      };
      t.flat[NAMED + i] = rows_of(weight);
      this->wanted[NAMED + i] = dweight_.defined();
      this->wanted[NAMED + count + i] = dbias_.defined();
      if (dweight_.defined()) homes[NAMED + i] = rows_of(dweight_);
      if (dbias_.defined()) homes[NAMED + count + i] = dbias_.narrowed(first, size);
      first += size;
    }
  }

  // The gradients of the layer, from those of its parts.
  Gradients whole(Gradients parts) const {
    parts.found.resize(NAMED + 2);
    parts.found[NAMED] = dweight_;
    parts.found[NAMED + 1] = dbias_;
    return parts;
  }

  Operands t;
  Wanted wanted;
  Tensors homes;

 private:
  Tensor dweight_, dbias_;
};

// The columns of matrices in one.
inline Tensor concatenated(const Tensors& columns, int64_t N) {
  const auto whole = empty(Shape{columns[0].rows().size(0), N}, columns[0]);
  int64_t first = 0;
  for (const auto& each : columns) {
    copy(whole.narrowed(first, each.size(-1)), each.rows());
    first += each.size(-1);
  }
  return whole;
}

// The gradients of a call of one Linear layer from those of consecutive columns of its output.
inline Gradients gradients_of_columns(
    const Spec& spec, const Operands& t, const Extent& extent, const Tensors& grads,
    const Wanted& wanted, const Tensors& main_grads, const Kernels& kernels) {
  const auto count = grads.size() - spec.returns_sum - spec.returns_norm;
  const Tensors dys(grads.begin(), grads.begin() + static_cast<int64_t>(count));
  int64_t N = 0;
  for (const auto& dy : dys) {
    if (!dy.defined()) throw std::runtime_error("fused_norm: the gradient of a part is missing");
    N += dy.size(-1);
  }
  if (t.count() != 1 || N != extent.N || spec.activation || t[OUT_WEIGHT].defined()) {
    throw std::runtime_error("fused_norm: gradients of parts are for one Linear layer");
  }
  if (t.weight(0).is_contiguous() && main_grads.empty()) {
    const Columns columns(t, wanted, dys);
    Backward parts(
        spec, columns.t, extent, {}, grads, columns.wanted, main_grads, kernels);
    if (parts.adds_up()) {
      parts.write_to(columns.homes);
      return columns.whole(parts.run());
    }
  }
  Tensors joined{concatenated(dys, N)};
  joined.insert(joined.end(), grads.begin() + static_cast<int64_t>(count), grads.end());
  return Backward(spec, t, extent, {}, joined, wanted, main_grads, kernels).run();
}

// The gradients of a call by place. `given` are the gradients of its results; of one Linear layer, they may
// be those of consecutive columns of its output.
inline Gradients backward(
    const Spec& spec, const Operands& t, const Extent& extent, const Tensors& products,
    const Tensors& given, const Wanted& wanted, const Tensors& main_grads,
    const Kernels& kernels) {
  const Operands aligned_t = spec.invariant ? with_aligned_rows(t) : t;
  Tensors grads, ready;
  for (const auto& g : given) grads.push_back(spec.invariant ? aligned(g) : dense(g));
  for (const auto& h : products) ready.push_back(dense(h));
  const bool is_parted = given.size() > t.count() + spec.returns_sum + spec.returns_norm;
  auto result = is_parted
      ? gradients_of_columns(spec, aligned_t, extent, grads, wanted, main_grads, kernels)
      : Backward(spec, aligned_t, extent, ready, grads, wanted, main_grads, kernels).run();
  auto& dx = result.found[X];
  // Autograd would add the gradient of the norm to that of the sum.
  const Tensor dsum = spec.returns_sum ? given[given.size() - 1 - spec.returns_norm] : Tensor();
  if (dx.defined() && dsum.defined()) dx = laid_as_sum(dx, {dsum, dx});
  return result;
}

}  // namespace fused_norm
