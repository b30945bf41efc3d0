#pragma once

#include <cstdint>
#include <vector>

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>

#include "bindings/tensors.hpp"
#include "worker/dense_stream.hpp"

/// What a stream offers where the servers step.
namespace psplus::bindings {

void bind_gradient_push(pybind11::class_<worker::DenseStream>& stream);

/// State of an extent's parameters as Python gives it; keeps what it points into.
class GivenState {
 public:
  /// Throws as check_tensors() does, and std::invalid_argument for counts of another number.
  GivenState(const std::vector<std::vector<at::Tensor>>& planes, std::vector<std::uint64_t> counts,
             Specs params);
  [[nodiscard]] worker::FirstState view() const noexcept { return {planes_, counts_}; }

 private:
  std::vector<ReadableTensors> kept_;
  std::vector<std::vector<const void*>> planes_;
  std::vector<std::uint64_t> counts_;
};

}  // namespace psplus::bindings
