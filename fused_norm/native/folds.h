// Folded weights, which Python keeps, found again without it while their parameters are as they
// were.

#pragma once

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "nodes.h"

namespace fused_norm {

// fold(normalization, weight_offset, activation, gamma, beta, weight, bias, *up) returns the folded
// weight and the sums beside it, or None where the parameters are met for the first time.
inline PyObject* python_fold = nullptr;

// Whether folds are kept, and what stands for the version of a tensor that counts none: the number
// of the promise under which it does not change, 0 without a promise.
struct Keeping {
  bool is_allowed = false;
  int64_t promise = 0;
};

using Memory = c10::intrusive_ptr<c10::StorageImpl>;
using WeakMemory = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A weight with gamma folded in, its row sums and its constants, and what owns their memory. That
// has no object in Python, so that references to it need no lock of Python's.
struct Fold {
  void *weight, *sums, *constants;
  Memory owns_weight, owns_sums;

  // Of Wc [N, K], and s and c [2, N].
  static Fold of(const Tensor& weight, const Tensor& sums) {
    auto* first = static_cast<float*>(sums.data_ptr());
    return {weight.data_ptr(), first, first + sums.size(1), memory_of(weight), memory_of(sums)};
  }
  static Memory memory_of(const Tensor& t) {
    return Memory::reclaim_copy(t.storage().unsafeGetStorageImpl());
  }

  void give(Call& call) const {
    call.fold_weight = weight;
    call.fold_sums = sums;
    call.fold_constants = constants;
  }
};

// What a parameter was when it was folded. The address of a tensor alone says nothing, as another
// may get it; that of its storage does as long as there is a weak reference.
class Folded {
 public:
  Folded() = default;
  Folded(const Tensor& t, int64_t promise) : is_there_(t.defined()) {
    if (!is_there_) return;
    tensor_ = t.unsafeGetTensorImpl();
    storage_ = t.storage().getWeakStorageImpl();
    data_ = t.data_ptr();
    dtype_ = t.scalar_type();
    version_ = version(t, promise);
  }

  // Its sizes are not looked at.
  bool is(const Tensor& t, int64_t promise) const {
    if (!is_there_ || !t.defined()) return is_there_ == t.defined();
    return t.unsafeGetTensorImpl() == tensor_ &&
        t.storage().unsafeGetStorageImpl() == storage_._unsafe_get_target() &&
        t.data_ptr() == data_ && t.scalar_type() == dtype_ && version(t, promise) == version_;
  }

  static bool has_version(const Tensor& t) {
    return t.unsafeGetTensorImpl()->version_counter().enabled();
  }

 private:
  static int64_t version(const Tensor& t, int64_t promise) {
    return has_version(t) ? int64_t{t.unsafeGetTensorImpl()->version_counter().current_version()}
                          : -promise;
  }

  bool is_there_ = false;
  // Compared, never followed.
  const c10::TensorImpl* tensor_ = nullptr;
  const void* data_ = nullptr;
  WeakMemory storage_{Memory()};
  at::ScalarType dtype_ = at::kFloat;
  int64_t version_ = 0;
};

// What a fold depends on: a norm, an activation, the parameters, and the stream that made it.
struct FoldKey {
  using Parameters = std::array<const Tensor*, 2 + 2 * MOST_PARTS>;

  int normalization, activation;
  double weight_offset;
  int64_t K, N;
  std::optional<c10::Stream> stream;

  bool operator==(const FoldKey&) const = default;

  // Gamma, beta, the weight and the bias, and those of what it gates, or of further Linear layers,
  // if they are tensors of their own.
  static Parameters parameters(const Operands& t) {
    static const Tensor none;
    Parameters found;
    found.fill(&none);
    found[0] = &t[GAMMA];
    found[1] = &t[BETA];
    for (size_t i = 0; i < std::min<size_t>(t.count(), MOST_PARTS); ++i) {
      found[2 + 2 * i] = &t.weight(i);
      found[3 + 2 * i] = &t.bias(i);
    }
    return found;
  }
};

// The folds that Python has named. It keeps them: here they have weak references, so that none
// outlives the parameters or what Python knows of them.
class Folds {
 public:
  // What each of the parameters was.
  using Was = std::array<Folded, std::tuple_size_v<FoldKey::Parameters>>;

  // Looks one up that is up to date.
  static std::optional<Fold> find(
      const FoldKey& key, const FoldKey::Parameters& of, int64_t promise) {
    std::lock_guard<std::mutex> lock(mutex());
    const auto found = known().find(of[2]->unsafeGetTensorImpl());
    if (found == known().end()) return std::nullopt;
    for (const auto& entry : found->second) {
      if (!entry.is(key, of, promise)) continue;
      if (auto fold = entry.fold()) return fold;
    }
    return std::nullopt;
  }

  // Knows one from now on, and no longer those that are gone. `was` is what its parameters were
  // before Python saw them.
  static void add(
      const FoldKey& key, const c10::TensorImpl* weight, Was was, const Fold& fold) {
    std::lock_guard<std::mutex> lock(mutex());
    for (auto each = known().begin(); each != known().end();) {
      auto& entries = each->second;
      std::erase_if(entries, [](const Entry& entry) { return entry.is_gone(); });
      each = entries.empty() ? known().erase(each) : std::next(each);
    }
    known()[weight].emplace_back(key, std::move(was), fold);
  }

 private:
  class Entry {
   public:
    Entry(const FoldKey& key, Was was, const Fold& fold)
        : key_(key), was_(std::move(was)), fold_(fold), weight_(fold.owns_weight),
          sums_(fold.owns_sums) {
      fold_.owns_weight.reset();
      fold_.owns_sums.reset();
    }

    bool is(const FoldKey& key, const FoldKey::Parameters& of, int64_t promise) const {
      return key_ == key &&
          std::equal(was_.begin(), was_.end(), of.begin(), [&](const auto& was, const auto* now) {
               return was.is(*now, promise);
             });
    }
    bool is_gone() const {
      return weight_.expired() || sums_.expired();
    }
    std::optional<Fold> fold() const {
      auto found = fold_;
      found.owns_weight = weight_.lock();
      found.owns_sums = sums_.lock();
      if (!found.owns_weight || !found.owns_sums) return std::nullopt;
      return found;
    }

   private:
    FoldKey key_;
    Was was_;
    // Without owning.
    Fold fold_;
    WeakMemory weight_, sums_;
  };

  // Neither is destroyed: threads may outlive what is static.
  static std::mutex& mutex() {
    static auto& created = *new std::mutex;
    return created;
  }
  static std::unordered_map<const c10::TensorImpl*, std::vector<Entry>>& known() {
    static auto& created = *new std::unordered_map<const c10::TensorImpl*, std::vector<Entry>>;
    return created;
  }
};

// Whether folds of a call's parameters may be kept, where no gradient follows: something has to
// tell when they are out of date. Sharded training writes gathered parameters without counting.
inline Keeping keeping(const Operands& t, bool keeps, bool is_alone, int64_t promise) {
  if (keeps || t[X].scalar_type() != at::kBFloat16) return {};
  const auto of = FoldKey::parameters(t);
  const bool may = promise || (is_alone && std::all_of(of.begin(), of.end(), [](const Tensor* v) {
                     return !v->defined() || Folded::has_version(*v);
                   }));
  return {may, promise};
}

// The fold for a call; nothing where Python meets the parameters for the first time, as they are.
inline std::optional<Fold> kept_fold(
    const Seam& kind, const Operands& t, const Call& call, int64_t promise) {
  const auto of = FoldKey::parameters(t);
  const FoldKey key{
      kind.normalization, static_cast<int>(call.activation), kind.weight_offset, call.K, call.N,
      current_stream(t[X].device())};
  if (auto fold = Folds::find(key, of, promise)) return fold;
  // Before Python looks: what changes meanwhile is then out of date.
  Folds::Was was;
  std::transform(of.begin(), of.end(), was.begin(), [&](const Tensor* v) {
    return Folded(*v, promise);
  });
  std::optional<Fold> fold;
  {
    py::gil_scoped_acquire lock;
    const size_t count = 2 + 2 * t.count();
    py::tuple arguments(3 + count);
    arguments.set(0, py::cast(key.normalization));
    arguments.set(1, py::cast(key.weight_offset));
    arguments.set(2, py::cast(key.activation));
    for (size_t i = 0; i < count; ++i) arguments.set(3 + i, wrap(*of[i]));
    const auto found = py::checked(PyObject_CallObject(python_fold, arguments.ptr()));
    if (found.is_none()) return std::nullopt;
    const auto tensors = unwrapped(found, 2);
    fold = Fold::of(tensors[0], tensors[1]);
  }
  Folds::add(key, of[2]->unsafeGetTensorImpl(), std::move(was), *fold);
  return fold;
}

// Gives a call that no graph captures its workspace: on a GPU that of the stream's calls before, if
// it is large enough. They run one after another, and allocating takes a tenth of a small one's time.
inline Tensor scratch_of(Call& call, const Tensor& like) {
  constexpr int64_t least = 1 << 16, most = 1 << 22;
  static auto& mutex = *new std::mutex;
  static auto& kept = *new std::vector<std::pair<std::optional<c10::Stream>, Tensor>>;
  if (like.is_cpu() || call.workspace_bytes <= 0 || call.workspace_bytes > most) {
    return workspace_of(call, like);
  }
  const auto stream = current_stream(like.device());
  std::lock_guard<std::mutex> lock(mutex);
  auto found = std::find_if(
      kept.begin(), kept.end(), [&](const auto& each) { return each.first == stream; });
  if (found == kept.end()) found = kept.emplace(kept.end(), stream, Tensor());
  auto& [_, scratch] = *found;
  if (!scratch.defined() || scratch.numel() < call.workspace_bytes) {
    auto bytes = least;
    while (bytes < call.workspace_bytes) bytes *= 2;
    scratch = empty({bytes}, like, at::kByte);
  }
  call.workspace = scratch.data_ptr();
  return scratch;
}

}  // namespace fused_norm
