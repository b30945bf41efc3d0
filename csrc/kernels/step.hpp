#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

/// One step of an optimizer in one pass over memory: read gradient, state and the servers' value,
/// write state, update and parameter.
namespace psplus::kernels {

enum class StepKind : std::uint8_t { sgd, adam, adagrad };

/// Options as torch.optim names them; `lr` and all else are read anew at each step.
struct SgdOptions {
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};
struct AdamOptions {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool decoupled = false;  ///< AdamW: the parameter decays by lr * weight_decay, the moments do not
  bool amsgrad = false;
  bool maximize = false;
};
struct AdagradOptions {
  double lr = 0;
  double lr_decay = 0;
  double eps = 0;
  double weight_decay = 0;
  bool maximize = false;
};

/// What a kernel needs to know of one step of one parameter: the options, with all that depends on
/// the step's number worked out in float64.
struct StepRule {
  StepKind kind = StepKind::sgd;
  bool maximize = false;
  bool nesterov = false;
  bool first = false;  ///< SGD: there is no momentum buffer yet, the gradient becomes it
  bool amsgrad = false;
  double rate = 0;          ///< factor of the direction
  double weight_decay = 0;  ///< added to the gradient, times the parameter
  double decay = 0;         ///< added to the update, times the parameter
  double momentum = 0;
  double fresh = 1;  ///< 1 - dampening
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double root_factor = 1;  ///< 1 / sqrt(1 - beta2^t)

  /// How many state tensors a step reads and writes, in the order momentum_buffer; exp_avg,
  /// exp_avg_sq, max_exp_avg_sq; sum.
  [[nodiscard]] std::size_t state_count() const noexcept;
  /// Whether a step reads the parameter that it starts from.
  [[nodiscard]] bool reads_parameter() const noexcept;
};

/// Momentum after Sutskever et al. 2013 in torch's form: b = momentum * b + (1 - dampening) * g,
/// update = lr * b, or lr * (g + momentum * b) for Nesterov. `first`: b = g.
[[nodiscard]] StepRule make_rule(const SgdOptions& options, bool first) noexcept;
/// Adam (Kingma and Ba 2015, algorithm 1), AMSGrad (Reddi et al. 2018) and AdamW (Loshchilov and
/// Hutter 2019, algorithm 2); `t` counts steps from 1.
[[nodiscard]] StepRule make_rule(const AdamOptions& options, double t) noexcept;
/// Adagrad (Duchi et al. 2011) with torch's decay: rate lr / (1 + (t - 1) * lr_decay).
[[nodiscard]] StepRule make_rule(const AdagradOptions& options, double t) noexcept;

inline constexpr std::size_t kMaxStates = 3;

/// A run of scalars of one parameter. Gradient, parameter and state have the parameter's dtype and
/// any alignment, as has `w`; `update` lies at a multiple of 64 bytes.
template <class S>
struct StepRun {
  const void* gradient = nullptr;
  void* states[kMaxStates] = {};
  /// Read as what the step starts from when the rule decays weights; written when there is a `w`.
  void* parameter = nullptr;
  S* update = nullptr;
  /// The servers' value: the parameter becomes w - local_scale * update. Null: it stays.
  /// Others may be writing it: what came of it counts only if the caller finds afterwards that
  /// they were not, and `update` holds what it takes to compute the parameter again.
  const S* w = nullptr;
  S local_scale = 0;
  /// Write `update` and `parameter` past the caches: pays when they do not fit anyway. Followed by
  /// a store fence.
  bool streams = false;
};

}  // namespace psplus::kernels
