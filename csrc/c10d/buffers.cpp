#include "c10d/buffers.hpp"

namespace psplus::pg {
namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

Buffer Buffer::of(const at::Tensor& tensor) {
  if (is_plain(tensor)) return {tensor, tensor};
  return {tensor, tensor.resolve_conj().resolve_neg().contiguous()};
}

Buffer Buffer::for_output(const at::Tensor& tensor) {
  if (is_plain(tensor)) return {tensor, tensor};
  return {tensor,
          at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous))};
}

void Buffer::write_back() const {
  if (!plain_.is_same(tensor_)) at::Tensor{tensor_}.copy_(plain_);
}

void Buffers::add(Buffer buffer) {
  pointers_.push_back(buffer.data());
  bytes_.push_back(buffer.bytes());
  buffers_.push_back(std::move(buffer));
}

Buffers Buffers::of(const std::vector<at::Tensor>& tensors) {
  Buffers result;
  for (const at::Tensor& tensor : tensors) result.add(Buffer::of(tensor));
  return result;
}

Buffers Buffers::for_output(const std::vector<at::Tensor>& tensors) {
  Buffers result;
  for (const at::Tensor& tensor : tensors) result.add(Buffer::for_output(tensor));
  return result;
}

Buffers Buffers::slices(Buffer whole, const at::Tensor& tensor,
                        const std::vector<std::int64_t>& rows, std::size_t ranks) {
  Buffers result;
  std::byte* at = whole.data();
  const std::size_t count = rows.empty() ? 0 : static_cast<std::size_t>(tensor.size(0));
  const std::size_t row_bytes = count == 0 ? 0 : whole.bytes() / count;
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::size_t bytes =
        rows.empty() ? whole.bytes() / ranks : static_cast<std::size_t>(rows[r]) * row_bytes;
    result.pointers_.push_back(at);
    result.bytes_.push_back(bytes);
    if (bytes != 0) at += bytes;
  }
  result.buffers_.push_back(std::move(whole));
  return result;
}

std::vector<std::size_t> Buffers::elements(std::size_t element_bytes) const {
  std::vector<std::size_t> result;
  for (const std::size_t bytes : bytes_) result.push_back(bytes / element_bytes);
  return result;
}

void Buffers::write_back() const {
  for (const Buffer& buffer : buffers_) buffer.write_back();
}

}  // namespace psplus::pg
