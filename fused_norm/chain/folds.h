// Folds of frozen parameters. Python makes them, owns them and says when they end; the chain keeps them
// here to look them up without Python.

#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <mutex>

#include "operands.h"

namespace fused_norm {

// 1 if any parameters are frozen, 2 if values of some have left their device.
inline std::atomic<int> frozen_level{0};

// A weight with gamma folded in, with its row sums and constants.
struct Fold {
  Tensor weight, sums;
  // The activation in the epilogue of the product that it is for; -1 for no fold.
  int64_t activation = -1;
  // Whether the parameters' own values are elsewhere.
  bool is_needed = false;

  bool is_for(int64_t of) const { return activation == of; }
  void give(Call& call) const {
    call.fold_weight = address(weight);
    call.fold_sums = address(sums);
    call.fold_constants = static_cast<float*>(address(sums)) + sums.size(1);
  }
};

// Folds by the addresses of their parameters, which stay allocated while frozen.
class Folds {
 public:
  // Returns a fold, or one that says there is none to be made; nothing if Python has to look.
  std::optional<Fold> find(const Spec& spec, const Operands& t, bool is_captured) {
    if (is_captured) return std::nullopt;
    const auto key = key_of(spec, t);
    const std::lock_guard lock(mutex_);
    for (const auto& [of, fold] : kept_) {
      if (of == key) return fold;
    }
    return std::nullopt;
  }
  void keep(const Spec& spec, const Operands& t, const Fold& fold, bool is_captured) {
    // Without a fold, another number of rows may want one.
    if (is_captured || fold.activation < 0 || !frozen_level) return;
    Fold owned = fold;
    owned.weight = Tensor::owned(fold.weight.released());
    owned.sums = Tensor::owned(fold.sums.released());
    const std::lock_guard lock(mutex_);
    kept_.emplace_back(key_of(spec, t), std::move(owned));
  }
  void clear() {
    std::deque<std::pair<Key, Fold>> ended;
    const std::lock_guard lock(mutex_);
    ended.swap(kept_);
  }

 private:
  // Addresses, sizes, the purpose of the fold, and the stream.
  using Key = std::vector<int64_t>;

  static Key key_of(const Spec& spec, const Operands& t) {
    int64_t offset;
    std::memcpy(&offset, &spec.weight_offset, sizeof offset);
    Key key{
        spec.normalization, spec.activation, spec.is_joined, offset, t.norm_dtype(), t[X].size(-1),
        t[X].device(), reinterpret_cast<int64_t>(current_stream(t[X].device()))};
    for (const Place place : {GAMMA, BETA}) key.push_back(reinterpret_cast<int64_t>(address(t[place])));
    for (size_t i = NAMED; i < t.flat.size(); ++i) {
      key.push_back(reinterpret_cast<int64_t>(address(t.flat[i])));
      if (t.flat[i].defined()) key.push_back(t.flat[i].size(0));
    }
    return key;
  }

  std::mutex mutex_;
  std::deque<std::pair<Key, Fold>> kept_;
};
inline Folds folds;

// The fold of a call, if it has one; nothing if Python has to look, which knows what is frozen and
// whose values are elsewhere.
inline std::optional<Fold> fold_of(
    const Spec& spec, const Operands& t, bool keeps, bool is_captured) {
  const int level = frozen_level;
  const bool may_fold = !keeps && !t[X].is_cpu() && t[X].dtype() == BFLOAT16;
  if (level > 0 && may_fold) return folds.find(spec, t, is_captured);
  if (level > 1) return std::nullopt;
  return Fold();
}

}  // namespace fused_norm
