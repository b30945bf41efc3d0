#pragma once

#include <cstddef>
#include <cstdint>

/// How a server makes new values of what is pushed: by subtracting it, or by an optimizer's step.
namespace psplus::store {

/// The numbers lie in segments and travel: never renumber.
enum class RuleKind : std::uint8_t {
  kNone = 0,  ///< pushes are updates, which are subtracted
  kSgd = 1,   ///< pushes are gradients, as for all below
  kAdam = 2,  ///< AdamW too: a flag of the options
  kAdagrad = 3,
};

inline constexpr std::uint32_t kMaxPlanes = 3;

/// The rule of a stream, and how many values of state its servers keep for each parameter value of
/// an extent: momentum_buffer; exp_avg, exp_avg_sq, max_exp_avg_sq; sum. SGD that will never have
/// momentum needs none, Adam without AMSGrad two.
struct Rule {
  RuleKind kind = RuleKind::kNone;
  std::uint8_t planes = 0;

  [[nodiscard]] constexpr bool steps() const noexcept { return kind != RuleKind::kNone; }
  [[nodiscard]] constexpr bool is_valid() const noexcept {
    switch (kind) {
      case RuleKind::kNone:
        return planes == 0;
      case RuleKind::kSgd:
        return planes <= 1;
      case RuleKind::kAdam:
        return planes == 2 || planes == 3;
      case RuleKind::kAdagrad:
        return planes == 1;
    }
    return false;
  }
  friend bool operator==(const Rule&, const Rule&) = default;
};

enum StepFlags : std::uint32_t {
  kStepNesterov = 1,
  kStepMaximize = 2,
  kStepDecoupled = 4,  ///< AdamW
  kStepAmsgrad = 8,
};
inline constexpr std::uint32_t kKnownStepFlags =
    kStepNesterov | kStepMaximize | kStepDecoupled | kStepAmsgrad;

/// Hyper-parameters of one parameter at one push, named as torch.optim does. Lies in push slots,
/// which their worker can write at any time: whoever reads it must cope with any bits.
struct StepOptions {
  std::uint32_t kind = 0;   ///< RuleKind
  std::uint32_t flags = 0;  ///< StepFlags
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double lr_decay = 0;
  std::uint64_t count = 0;  ///< of a push that sets state: the steps that are in it
};
static_assert(sizeof(StepOptions) == 80);

}  // namespace psplus::store
