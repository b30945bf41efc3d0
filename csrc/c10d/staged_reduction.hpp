#pragma once

#include <cstddef>
#include <cstdint>

#include "c10d/torch_compat.hpp"
#include "collectives/collectives.hpp"

namespace psplus::pg {

/// A reduction whose terms are first reduced within hosts and then between them. Averages are sums
/// until the end: of integers in int64, where they fit; of 16-bit floats divided before, as their
/// sums may not fit.
class StagedReduction {
 public:
  StagedReduction(const collectives::ReduceSpec& spec, std::size_t ranks);

  /// The tensor's elements, one after the other, in the type they are reduced in; its own memory
  /// where that has this form.
  [[nodiscard]] at::Tensor input(const at::Tensor& tensor) const;
  /// Puts the reduced elements, which may be changed, where they belong.
  void finish(at::Tensor reduced, const at::Tensor& out) const;

  /// Within a host, where premul_sum's factors are applied.
  [[nodiscard]] const collectives::ReduceSpec& within() const { return within_; }
  [[nodiscard]] std::size_t element_bytes() const {
    return collectives::element_bytes(within_.element);
  }

 private:
  collectives::ReduceSpec within_;
  bool widen_ = false;
  std::int64_t divisor_ = 1;
};

}  // namespace psplus::pg
