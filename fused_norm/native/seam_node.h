// The backward of a call of the op family as a node of PyTorch's graph.

#pragma once

#include <mutex>

#include "nodes.h"
#include "seam_backward.h"

namespace fused_norm {

// gradients(kind, tensors, products, grad_outputs, wanted): what is left to Python.
inline PyObject* python_backward = nullptr;

class SeamBackward : public torch::autograd::Node {
 public:
  SeamBackward(const Seam& kind, const Operands& t, const Kernels& kernels)
      : kind_(kind), kernels_(kernels), stream_(current_stream(t[X].device())),
        has_sum_(t.has_sum()), edges_(t.flat.size()) {
    torch::autograd::edge_list edges;
    edges.reserve(t.flat.size());
    for (size_t place = 0; place < t.flat.size(); ++place) {
      edges_[place] = -1;
      if (!t.flat[place].defined() || place == MEAN || place == RSTD) continue;
      edges_[place] = static_cast<int>(edges.size());
      edges.push_back(torch::autograd::impl::gradient_edge(t.flat[place]));
    }
    set_next_edges(std::move(edges));
  }

  // Keeps what the backward needs, once the results have this node: what Python's function keeps, in
  // the same order, so that of a checkpoint one may compute what the other did.
  void save(const Operands& t, const Results& results) {
    saved_.reserve(t.flat.size() + results.products.size());
    const auto keep = [&](size_t place, const Tensor& tensor, bool is_output = false) {
      if (!tensor.defined()) return;
      places_.push_back(static_cast<int>(place));
      saved_.emplace_back(tensor, is_output);
    };
    if (results.sum.defined()) {
      keep(X, results.sum, true);
    } else {
      keep(X, t[X]);
    }
    for (const auto& o : OF_NORM) {
      if (o.gradient) keep(o.place, t[o.place]);
    }
    keep(MEAN, results.mean.defined() ? results.mean : t[MEAN]);
    keep(RSTD, results.rstd.defined() ? results.rstd : t[RSTD]);
    keep(OUT_WEIGHT, t[OUT_WEIGHT]);
    for (size_t i = 0; i < t.count(); ++i) keep(NAMED + i, t.weight(i));
    for (size_t i = 0; i < t.count(); ++i) {
      // Only an activation's gradient depends on it.
      if (kind_.activation) keep(NAMED + t.count() + i, t.bias(i));
    }
    for (const auto& h : results.products) keep(t.flat.size(), h);
  }

  std::string name() const override {
    return edges_[OUT_WEIGHT] < 0 ? "NormLinearBackward" : "NormMlpBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved_) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    if (none_defined(gradients)) return variable_list(num_outputs());
    if (!reaches_norm(kind_, gradients)) return by_edge(passed_on(gradients), gradients);
    const auto [t, products] = unpacked();
    const auto wanted = wanted_places(gradients);
    auto found = compute(t, products, gradients, wanted);
    if (!found) found = call_python(t, products, gradients, wanted);
    return by_edge(*found, gradients);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < saved_.size(); ++i) {
      // Of x and what is added to it the sum is saved, which is a result.
      args.collect(saved_[i], /*is_output=*/places_[i] == X && has_sum_);
    }
    for (const int place : places_) args.collect(static_cast<int64_t>(place));
    for (const int edge : edges_) args.collect(static_cast<int64_t>(edge));
    args.collect(kind_.eps);
    args.collect(kind_.weight_offset);
    args.collect(static_cast<int64_t>(kind_.normalization));
    args.collect(static_cast<int64_t>(kind_.activation));
    for (const bool flag :
         {kind_.is_joined, kind_.returns_sum, kind_.returns_norm, kind_.recompute}) {
      args.collect(flag);
    }
  }

  variable_list apply_with_saved(
      const variable_list& gradients, torch::autograd::SwapSavedVariables& swap) override {
    for (auto& variable : saved_) swap.before(variable);
    variable_list results(num_outputs());
    if (!none_defined(gradients)) {
      const auto [t, products] = unpacked();
      const auto found = reaches_norm(kind_, gradients)
          ? call_python(t, products, gradients, wanted_places(gradients))
          : passed_on(gradients);
      results = by_edge(found, gradients);
    }
    for (auto& variable : saved_) swap.after(variable);
    return results;
  }

 private:
  std::pair<Operands, Tensors> unpacked() {
    std::pair<Operands, Tensors> both(Operands((edges_.size() - NAMED) / 2), Tensors());
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < saved_.size(); ++i) {
      auto tensor = saved_[i].unpack(getptr());
      if (places_[i] < static_cast<int>(edges_.size())) {
        both.first.flat[places_[i]] = std::move(tensor);
      } else {
        both.second.push_back(std::move(tensor));
      }
    }
    return both;
  }

  bool is_wanted(size_t place) const {
    return edges_[place] >= 0 && task_should_compute_output(edges_[place]);
  }

  // All summands get the same gradient, and what is added at the end that of the output.
  Wanted wanted_places(const variable_list& gradients) const {
    Wanted wanted(edges_.size());
    const auto places = reached(kind_, (edges_.size() - NAMED) / 2, gradients);
    for (size_t place = 0; place < wanted.size(); ++place) {
      if (!is_wanted(place) || !places[place] || place == OUT_RESIDUAL) continue;
      wanted[is_summand(place) ? X : place] = true;
    }
    return wanted;
  }

  // Where nothing else has one, the gradient of the sum is that of its summands.
  Tensors passed_on(const variable_list& gradients) const {
    Tensors found(edges_.size());
    found[X] = gradients[gradients.size() - 1 - kind_.returns_norm];
    return found;
  }

  variable_list by_edge(const Tensors& found, const variable_list& gradients) const {
    variable_list results(num_outputs());
    for (size_t place = 0; place < found.size(); ++place) {
      if (!is_wanted(place)) continue;
      results[edges_[place]] = place == OUT_RESIDUAL ? gradients[0]
          : is_summand(place)                        ? found[X]
                                                     : found[place];
    }
    return results;
  }

  // Runs the kernels; nothing where Python has to.
  std::optional<Tensors> compute(
      const Operands& t, const Tensors& products, const variable_list& gradients,
      const Wanted& wanted) const {
    const Tensor& x = t[X];
    if (at::GradMode::is_enabled() || is_watched() || current_stream(x.device()) != stream_) {
      return std::nullopt;
    }
    prepare_products(stream_);
    return gradients_of(kind_, t, products, gradients, wanted, kernels_);
  }

  Tensors call_python(
      const Operands& t, const Tensors& products, const variable_list& gradients,
      const Wanted& wanted) const {
    py::gil_scoped_acquire lock;
    py::list mask;
    for (const bool flag : wanted) mask.append(py::cast(flag));
    const auto kind = py::make_tuple(
        kind_.normalization, kind_.activation, kind_.eps, kind_.weight_offset, kind_.is_joined,
        kind_.returns_sum, kind_.returns_norm, kind_.recompute);
    const auto tensors = wrap_all(t.flat), kept = wrap_all(products), grads = wrap_all(gradients);
    const auto found = py::checked(PyObject_CallFunctionObjArgs(
        python_backward, kind.ptr(), tensors.ptr(), kept.ptr(), grads.ptr(), mask.ptr(), nullptr));
    return unwrapped(found, t.flat.size());
  }

  Seam kind_;
  Kernels kernels_;
  std::optional<c10::Stream> stream_;
  bool has_sum_;
  // The edge of each place, -1 for none; and the place of each tensor saved, past the last for a
  // product.
  c10::SmallVector<int, 16> edges_;
  c10::SmallVector<int, 16> places_;
  std::vector<SavedVariable> saved_;
  std::mutex mutex_;
};

// Gives results their node.
inline void set_node(
    const Seam& kind, const Operands& t, const Results& results, const Kernels& kernels) {
  auto* node = new SeamBackward(kind, t, kernels);
  const auto owner = own<NodePointer>(node);
  for (const auto& y : results.outputs) torch::autograd::set_history(y, owner);
  if (kind.returns_sum) torch::autograd::set_history(results.sum, owner);
  if (kind.returns_norm) torch::autograd::set_history(results.norm, owner);
  node->save(t, results);
  tell_of(owner);
}

}  // namespace fused_norm
