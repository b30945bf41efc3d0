#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "kernels/step.hpp"
#include "store/layout.hpp"
#include "worker/dense_stream.hpp"

namespace psplus::bindings {

using StepOptions =
    std::variant<kernels::SgdOptions, kernels::AdamOptions, kernels::AdagradOptions>;

/// One group of an optimizer at one step: the parameters with a gradient, and what belongs to them
/// in the same order.
struct StepGroup {
  StepOptions options;
  std::vector<std::int64_t> indices;  ///< places in the layout
  std::vector<at::Tensor> gradients;
  /// Columns of state, as many as the kind of step has; an undefined first column of SGD: no
  /// momentum buffer yet, one is made.
  std::vector<std::vector<std::optional<at::Tensor>>> states;
  std::vector<at::Tensor> steps;  ///< counters, empty for SGD
};

/// A step that the kernels can take. Keeps every tensor alive that it points into.
class FusedStep {
 public:
  /// @return null when a tensor is not as the kernels need it: dense, contiguous, on the CPU, in a
  /// dtype of float32, float64 or bfloat16 that is the parameter's own. Nothing has changed then.
  static std::unique_ptr<FusedStep> prepare(const std::vector<at::Tensor>& params,
                                            std::vector<StepGroup> groups);

  /// Waits for a slot, counts the steps and takes them. See DenseStream::fused_step.
  Result<std::int64_t> run(worker::DenseStream& stream, std::optional<double> local_scale);
  /// Momentum buffers that the step has made, with the places of their parameters.
  [[nodiscard]] const std::vector<std::pair<std::int64_t, at::Tensor>>& made() const noexcept {
    return made_;
  }

 private:
  bool add(const at::Tensor& param, StepGroup& group, std::size_t k);
  std::vector<at::Tensor> params_;
  std::vector<StepGroup> groups_;
  std::vector<std::pair<std::int64_t, at::Tensor>> made_;
  std::vector<worker::FusedParam> fused_;
};

}  // namespace psplus::bindings
