#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "store/control.hpp"
#include "store/rule.hpp"

/// Steps that a server takes itself: gradients in, values and state out.
namespace psplus::server {

/// Why options of a push cannot be stepped by; empty when they can.
[[nodiscard]] std::string fault_of(const store::StepOptions& options, store::Rule rule);

/// Whether a step by these options reads and writes state, and counts.
[[nodiscard]] bool counts(const store::StepOptions& options, store::Rule rule) noexcept;

/// One parameter's part of a push: `gradient` points at the scalars at hand.
template <class S>
struct GradientTerm {
  const S* gradient;
  const store::StepOptions* options;
  double scale;  ///< factor of the learning rate
};

/// Where the result goes: values, and the planes of state behind them; each at a multiple of 64
/// bytes, holding what they were before.
template <class S>
struct StepTarget {
  S* values;
  S* planes[store::kMaxPlanes];
};

/// Steps on `n` scalars of one parameter that has taken `count` steps: kAdd once for each term, one
/// after the other; kMean once, on `mean_scale` times the sum of the gradients, by the options of
/// the first term. Whatever bits the options have, nothing is touched but the target.
template <class S>
void take_steps(store::BatchKind kind, store::Rule rule, std::span<const GradientTerm<S>> terms,
                double mean_scale, std::uint64_t count, const StepTarget<S>& target, std::size_t n);

/// Steps taken after a batch of kAdd or kMean with these options, in order.
[[nodiscard]] std::uint64_t count_after(store::BatchKind kind, store::Rule rule,
                                        std::span<const store::StepOptions* const> options,
                                        std::uint64_t count) noexcept;

}  // namespace psplus::server
