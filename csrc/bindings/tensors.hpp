#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "store/layout.hpp"

namespace psplus::bindings {

/// The dtype of a layout for a tensor; throws std::invalid_argument for others.
[[nodiscard]] DType to_dtype(at::ScalarType type);

/// Whether the tensor's elements lie in its memory as they are, one after the other. Conjugated and
/// negated views are lazy in torch: their memory holds other values.
[[nodiscard]] bool is_plain(const at::Tensor& tensor);

using Specs = std::span<const store::ParamSpec>;

/// A parameter as Python declares it: name, dtype and shape.
using Declared = std::tuple<std::string, std::string, std::vector<std::int64_t>>;
/// Throws std::invalid_argument, naming the parameter, for a dtype that is not supported.
[[nodiscard]] std::vector<store::ParamSpec> to_specs(const std::vector<Declared>& params);

/// Throws std::invalid_argument, naming the parameter, unless every tensor is a dense CPU tensor of
/// the declared shape and dtype.
void check_tensors(const std::vector<at::Tensor>& tensors, Specs params);

/// Tensors as pointers to contiguous elements, in the declared order, for reading. Keeps copies
/// of those that are not contiguous. Throws as check_tensors() does.
class ReadableTensors {
 public:
  ReadableTensors(const std::vector<at::Tensor>& tensors, Specs params);
  [[nodiscard]] std::span<const void* const> pointers() const noexcept { return pointers_; }

 private:
  std::vector<at::Tensor> kept_;
  std::vector<const void*> pointers_;
};

/// The same for writing: `finish()` copies into tensors that are not contiguous and bumps the
/// version counter of each, so that a backward which saved the old values raises as in plain torch.
class WritableTensors {
 public:
  WritableTensors(const std::vector<at::Tensor>& tensors, Specs params);
  [[nodiscard]] std::span<void* const> pointers() const noexcept { return pointers_; }
  void finish();

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> contiguous_;
  std::vector<void*> pointers_;
};

}  // namespace psplus::bindings
