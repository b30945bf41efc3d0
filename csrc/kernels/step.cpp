#include "kernels/step.hpp"

#include <cmath>

namespace psplus::kernels {

std::size_t StepRule::state_count() const noexcept {
  switch (kind) {
    case StepKind::sgd:
      return momentum != 0 ? 1 : 0;
    case StepKind::adam:
      return amsgrad ? 3 : 2;
    case StepKind::adagrad:
      return 1;
  }
  return 0;
}

bool StepRule::reads_parameter() const noexcept { return weight_decay != 0 || decay != 0; }

StepRule make_rule(const SgdOptions& options, bool first) noexcept {
  return {.kind = StepKind::sgd,
          .maximize = options.maximize,
          .nesterov = options.nesterov,
          .first = first,
          .rate = options.lr,
          .weight_decay = options.weight_decay,
          .momentum = options.momentum,
          .fresh = 1 - options.dampening};
}

StepRule make_rule(const AdamOptions& options, double t) noexcept {
  return {.kind = StepKind::adam,
          .maximize = options.maximize,
          .amsgrad = options.amsgrad,
          .rate = options.lr / (1 - std::pow(options.beta1, t)),
          .weight_decay = options.decoupled ? 0 : options.weight_decay,
          .decay = options.decoupled ? options.lr * options.weight_decay : 0,
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = options.eps,
          .root_factor = 1 / std::sqrt(1 - std::pow(options.beta2, t))};
}

StepRule make_rule(const AdagradOptions& options, double t) noexcept {
  return {.kind = StepKind::adagrad,
          .maximize = options.maximize,
          .rate = options.lr / (1 + (t - 1) * options.lr_decay),
          .weight_decay = options.weight_decay,
          .eps = options.eps};
}

}  // namespace psplus::kernels
