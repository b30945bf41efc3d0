#pragma once

// The arithmetic of an optimizer's step for one element, or one vector of elements: the one place
// where it is written down. `Math` supplies sqrt() and larger() for V; instruction sets put it in
// an unnamed namespace, so that each file gets code of its own. Nothing here calls the standard
// library.

#include "kernels/step.hpp"

#if defined(__CUDACC__)
#define PSPLUS_EVERYWHERE __host__ __device__ __forceinline__
#else
#define PSPLUS_EVERYWHERE [[gnu::always_inline]] inline
#endif

namespace psplus::kernels {

/// A rule in the precision of the arithmetic.
template <class S>
struct StepConstants {
  PSPLUS_EVERYWHERE explicit StepConstants(const StepRule& rule)
      : rate(static_cast<S>(rule.rate)),
        weight_decay(static_cast<S>(rule.weight_decay)),
        decay(static_cast<S>(rule.decay)),
        momentum(static_cast<S>(rule.momentum)),
        fresh(static_cast<S>(rule.fresh)),
        beta1_rest(static_cast<S>(1 - rule.beta1)),
        beta2(static_cast<S>(rule.beta2)),
        beta2_rest(static_cast<S>(1 - rule.beta2)),
        eps(static_cast<S>(rule.eps)),
        root_factor(static_cast<S>(rule.root_factor)),
        nesterov(rule.nesterov),
        first(rule.first),
        amsgrad(rule.amsgrad) {}
  S rate, weight_decay, decay, momentum, fresh, beta1_rest, beta2, beta2_rest, eps, root_factor;
  bool nesterov, first, amsgrad;
};

/// The update, with the sign of a gradient, before weight decay of the decoupled kind. `g` is the
/// gradient, coupled weight decay included; `states` are changed in place.
template <class Math, StepKind kind, class S, class V>
PSPLUS_EVERYWHERE V step_update(const StepConstants<S>& c, V g, V (&states)[kMaxStates]) {
  if constexpr (kind == StepKind::sgd) {
    if (c.momentum == 0) return c.rate * g;
    V& buffer = states[0];
    buffer = c.first ? g : c.momentum * buffer + c.fresh * g;
    return c.rate * (c.nesterov ? g + c.momentum * buffer : buffer);
  } else if constexpr (kind == StepKind::adam) {
    states[0] = states[0] + c.beta1_rest * (g - states[0]);
    states[1] = c.beta2 * states[1] + c.beta2_rest * (g * g);
    if (c.amsgrad) states[2] = Math::larger(states[2], states[1]);
    const V second = c.amsgrad ? states[2] : states[1];
    return c.rate * (states[0] / (Math::sqrt(second) * c.root_factor + c.eps));
  } else {
    states[0] = states[0] + g * g;
    return c.rate * (g / (Math::sqrt(states[0]) + c.eps));
  }
}

}  // namespace psplus::kernels
