#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "store/limits.hpp"
#include "store/segment_header.hpp"

namespace psplus::testing {

/// Zeroed, page-aligned memory of this process that stands for a segment.
inline store::SegmentHandle heap_segment(std::size_t size) {
  void* const at = std::aligned_alloc(store::kPageBytes, store::round_up(size, store::kPageBytes));
  if (at == nullptr) throw std::bad_alloc{};
  std::memset(at, 0, size);
  return {.bytes = {static_cast<std::byte*>(at), size},
          .owner = std::shared_ptr<const void>{at, [](void* p) { std::free(p); }},
          .fd = -1};
}

/// Segments on the heap. Refuses the request number `fail_at` (counted from 0), if set.
class HeapSource final : public store::SegmentSource {
 public:
  Result<store::SegmentHandle> create(std::string_view label, std::size_t size) override {
    if (made_++ == fail_at)
      return Status{StatusCode::kNoSpace, "no memory for " + std::string{label}};
    return heap_segment(size);
  }
  [[nodiscard]] std::size_t made() const noexcept { return made_; }

  std::size_t fail_at = ~std::size_t{0};

 private:
  std::size_t made_ = 0;
};

}  // namespace psplus::testing
