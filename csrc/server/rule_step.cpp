#include "server/rule_step.hpp"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/format.hpp"
#include "kernels/kernels.hpp"

namespace psplus::server {
namespace {

using store::RuleKind;
using store::StepOptions;

struct alignas(64) Line {
  std::byte bytes[64];
};

/// Scratch for `n` scalars at a multiple of 64 bytes.
template <class S>
S* scratch(std::vector<Line>& lines, std::size_t n) {
  lines.resize((n * sizeof(S) + sizeof(Line) - 1) / sizeof(Line));
  return reinterpret_cast<S*>(lines.data());
}

kernels::StepRule rule_of(const StepOptions& options, store::Rule rule, double scale,
                          std::uint64_t count) {
  const double lr = options.lr * scale;
  const bool maximize = (options.flags & store::kStepMaximize) != 0;
  const double t = static_cast<double>(count) + 1;
  switch (rule.kind) {
    case RuleKind::kAdam:
      return make_rule(
          kernels::AdamOptions{.lr = lr,
                               .beta1 = options.beta1,
                               .beta2 = options.beta2,
                               .eps = options.eps,
                               .weight_decay = options.weight_decay,
                               .decoupled = (options.flags & store::kStepDecoupled) != 0,
                               // No more state than there is: the options may have changed since
                               // they were looked at.
                               .amsgrad = (options.flags & store::kStepAmsgrad) != 0 &&
                                          rule.planes == store::kMaxPlanes,
                               .maximize = maximize},
          t);
    case RuleKind::kAdagrad:
      return make_rule(kernels::AdagradOptions{.lr = lr,
                                               .lr_decay = options.lr_decay,
                                               .eps = options.eps,
                                               .weight_decay = options.weight_decay,
                                               .maximize = maximize},
                       t);
    case RuleKind::kSgd:
    case RuleKind::kNone:
      break;
  }
  return make_rule(kernels::SgdOptions{.lr = lr,
                                       .momentum = rule.planes == 0 ? 0 : options.momentum,
                                       .dampening = options.dampening,
                                       .weight_decay = options.weight_decay,
                                       .nesterov = (options.flags & store::kStepNesterov) != 0,
                                       .maximize = maximize},
                   count == 0);
}

}  // namespace

std::string fault_of(const StepOptions& options, store::Rule rule) {
  if (options.kind != raw(rule.kind)) return formatted("are of kind {}", options.kind);
  if ((options.flags & ~store::kKnownStepFlags) != 0)
    return formatted("have unknown flags {:#x}", options.flags);
  for (const double value : {options.lr, options.momentum, options.dampening, options.weight_decay,
                             options.beta1, options.beta2, options.eps, options.lr_decay})
    if (!std::isfinite(value)) return "have a value that is not finite";
  const bool lacks_buffer =
      rule.kind == RuleKind::kSgd && options.momentum != 0 && rule.planes == 0;
  const bool lacks_maximum = rule.kind == RuleKind::kAdam && rule.planes < store::kMaxPlanes &&
                             (options.flags & store::kStepAmsgrad) != 0;
  if (lacks_buffer || lacks_maximum) return "need more state than there is";
  return {};
}

bool counts(const StepOptions& options, store::Rule rule) noexcept {
  return rule.planes != 0 && (rule.kind != RuleKind::kSgd || options.momentum != 0);
}

template <class S>
void take_steps(store::BatchKind kind, store::Rule rule, std::span<const GradientTerm<S>> terms,
                double mean_scale, std::uint64_t count, const StepTarget<S>& target,
                std::size_t n) {
  thread_local std::vector<Line> updates;
  thread_local std::vector<Line> means;
  const auto& kernel = kernels::best().of<S>();
  constexpr DType kDType = sizeof(S) == sizeof(float) ? DType::float32 : DType::float64;
  kernels::StepRun<S> run{.parameter = target.values,
                          .update = scratch<S>(updates, n),
                          .w = target.values,
                          .local_scale = 1};
  for (std::size_t p = 0; p < rule.planes; ++p) run.states[p] = target.planes[p];
  if (kind == store::BatchKind::kMean) {
    S* const mean = scratch<S>(means, n);
    const auto factor = static_cast<S>(mean_scale);
    std::memcpy(mean, terms.front().gradient, n * sizeof(S));
    for (const GradientTerm<S>& term : terms.subspan(1))
      for (std::size_t i = 0; i < n; ++i) mean[i] += term.gradient[i];
    for (std::size_t i = 0; i < n; ++i) mean[i] *= factor;
    run.gradient = mean;
    kernel.step(kDType, rule_of(*terms.front().options, rule, 1.0, count), run, n);
    return;
  }
  for (const GradientTerm<S>& term : terms) {
    run.gradient = term.gradient;
    kernel.step(kDType, rule_of(*term.options, rule, term.scale, count), run, n);
    if (counts(*term.options, rule)) ++count;
  }
}

template void take_steps(store::BatchKind, store::Rule, std::span<const GradientTerm<float>>,
                         double, std::uint64_t, const StepTarget<float>&, std::size_t);
template void take_steps(store::BatchKind, store::Rule, std::span<const GradientTerm<double>>,
                         double, std::uint64_t, const StepTarget<double>&, std::size_t);

std::uint64_t count_after(store::BatchKind kind, store::Rule rule,
                          std::span<const StepOptions* const> options,
                          std::uint64_t count) noexcept {
  for (const StepOptions* const one : options) {
    if (counts(*one, rule)) ++count;
    if (kind == store::BatchKind::kMean) break;
  }
  return count;
}

}  // namespace psplus::server
