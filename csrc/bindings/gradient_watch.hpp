#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace psplus::bindings {

/// Looks at gradients for NaN and infinities right after a backward pass has accumulated them,
/// while they are in cache, and remembers what it saw until they change.
///
/// Thread safety: hooks of different parameters may run in parallel; first_nonfinite() and stop()
/// must not run while a backward pass does.
class GradientWatch {
 public:
  explicit GradientWatch(std::vector<at::Tensor> params);
  ~GradientWatch();
  GradientWatch(const GradientWatch&) = delete;
  GradientWatch& operator=(const GradientWatch&) = delete;

  /// @return place of the first parameter with a bad gradient, -1 for none, -2 when there is a
  /// gradient that the kernels cannot read.
  [[nodiscard]] std::int64_t first_nonfinite();
  void stop() noexcept;

 private:
  struct Seen;
  class Hook;
  std::vector<at::Tensor> params_;
  std::vector<std::shared_ptr<Seen>> seen_;
};

}  // namespace psplus::bindings
