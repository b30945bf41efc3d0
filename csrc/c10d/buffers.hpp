#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "c10d/torch_compat.hpp"

namespace psplus::pg {

/// A tensor's elements in logical order, one after the other: the tensor's own memory where it
/// looks like that, else a copy. Conjugated and negated views are lazy in torch and hold other
/// values, so they count as different.
class Buffer {
 public:
  /// To be read, or read and written.
  [[nodiscard]] static Buffer of(const at::Tensor& tensor);
  /// To be written only: a copy is not filled.
  [[nodiscard]] static Buffer for_output(const at::Tensor& tensor);

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(plain_.data_ptr()); }
  [[nodiscard]] std::size_t bytes() const { return plain_.nbytes(); }
  [[nodiscard]] std::size_t elements() const { return static_cast<std::size_t>(plain_.numel()); }

  /// The elements as a tensor in logical order.
  [[nodiscard]] at::Tensor plain() const { return plain_; }

  /// Brings what was written into the tensor itself.
  void write_back() const;

 private:
  Buffer(at::Tensor tensor, at::Tensor plain)
      : tensor_(std::move(tensor)), plain_(std::move(plain)) {}
  at::Tensor tensor_;
  at::Tensor plain_;
};

/// One buffer a rank, and what the collectives want to know of them.
class Buffers {
 public:
  [[nodiscard]] static Buffers of(const std::vector<at::Tensor>& tensors);
  [[nodiscard]] static Buffers for_output(const std::vector<at::Tensor>& tensors);
  /// Consecutive stretches of one tensor along its first dimension; all equal when `rows` is empty.
  [[nodiscard]] static Buffers slices(Buffer whole, const at::Tensor& tensor,
                                      const std::vector<std::int64_t>& rows, std::size_t ranks);

  [[nodiscard]] std::span<void* const> pointers() const { return pointers_; }
  [[nodiscard]] std::span<const void* const> const_pointers() const {
    return {const_cast<const void* const*>(pointers_.data()), pointers_.size()};
  }
  [[nodiscard]] std::span<const std::size_t> bytes() const { return bytes_; }
  [[nodiscard]] std::vector<std::size_t> elements(std::size_t element_bytes) const;
  void write_back() const;

 private:
  void add(Buffer buffer);
  std::vector<Buffer> buffers_;
  std::vector<void*> pointers_;
  std::vector<std::size_t> bytes_;
};

}  // namespace psplus::pg
