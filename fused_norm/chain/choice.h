// Chooses how a call on a CPU runs, from measurements on such CPUs.

#pragma once

#include <cmath>

#include "kernels.h"

namespace fused_norm {

// `Device.as_array` in devices/costs.py, which has the model: the number of exceptions, the bytes of
// an element, costs, exceptions.
class Costs {
 public:
  explicit Costs(const double* at) : at_(at) {}

  // The faster of FUSED and AROUND_PRODUCTS. N counts the outputs of the product, twice a gate's.
  int64_t fastest(const Call& call, int64_t N, bool follows) const {
    if (!at_) return FUSED;
    const int64_t kind = !call.activation ? 0 : call.activation < GATED ? 1 : 2;
    const auto strategy = exception(kind, follows, call, N);
    if (strategy >= 0) return STRATEGIES[strategy];
    const double M = real(call.M), K = real(call.K), n = real(N);
    const bool is_large = at_[1] == 4 && K * n * at_[1] >= LARGE_WEIGHT;
    const int64_t set = call.M == 1 ? is_large : call.M <= MOST_FEW_ROWS ? 2 : 3;
    const double* const costs =
        at_ + 2 + (((kind * DIRECTIONS + follows) * SETS + set) * 2) * TERMS;
    double pages = fresh(M * n);
    if (follows && !kind) pages += fresh(M * K) + fresh(K * n);
    const double terms[] = {M * K * n, K * n, M * K, M * n, pages};
    const auto us = [&](const double* of) {
      double work = 0;
      for (int i = 1; i < TERMS; ++i) work += of[i] * terms[i - 1];
      return of[0] + work / real(call.threads);
    };
    return us(costs) <= us(costs + TERMS) ? STRATEGIES[0] : STRATEGIES[1];
  }

 private:
  static constexpr int64_t KINDS = 3, DIRECTIONS = 2, SETS = 4, TERMS = 6, FIELDS = 6;
  static constexpr int64_t MOST_FEW_ROWS = 15;
  // Bytes of a float32 weight that caches no longer hold when one row's next call comes.
  static constexpr double LARGE_WEIGHT = 1048576.0;
  static constexpr int64_t STRATEGIES[] = {FUSED, AROUND_PRODUCTS};
  // Sizes are alike if the ratio of each is at most this.
  static constexpr double ALIKE = 1.25;

  static double real(int64_t value) { return static_cast<double>(value); }

  // The elements of a result whose memory the C library requests from the system each time.
  double fresh(double elements) const { return elements * at_[1] >= 33554432.0 ? elements : 0.0; }

  // The index in STRATEGIES of the nearest exception among similar sizes, -1 without one.
  int64_t exception(int64_t kind, bool follows, const Call& call, int64_t N) const {
    const auto count = static_cast<int64_t>(*at_);
    const double* row = at_ + 2 + KINDS * DIRECTIONS * SETS * 2 * TERMS;
    const double sizes[] = {real(call.M), real(call.K), real(N)};
    double nearest = ALIKE * ALIKE * ALIKE;
    int64_t found = -1;
    for (int64_t i = 0; i < count; ++i, row += FIELDS) {
      if (static_cast<int64_t>(row[0]) != kind || static_cast<bool>(row[1]) != follows) continue;
      double distance = 1;
      for (int j = 0; j < 3; ++j) {
        const double a = sizes[j], b = row[2 + j], ratio = a > b ? a / b : b / a;
        distance *= ratio <= ALIKE ? ratio : nearest;
      }
      if (distance < nearest) {
        nearest = distance;
        found = static_cast<int64_t>(row[5]);
      }
    }
    return found;
  }

  const double* at_;
};

}  // namespace fused_norm
