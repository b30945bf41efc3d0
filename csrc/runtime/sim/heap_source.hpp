#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "store/segment_header.hpp"

namespace psplus::sim {

/// Segments that are plain memory of this process: zeroed, page-aligned, freed with the last
/// handle.
class HeapSource final : public store::SegmentSource {
 public:
  Result<store::SegmentHandle> create(std::string_view label, std::size_t size) override;

  /// The `count`-th request from now on (1: the next) is refused, as on a full machine; only that
  /// one.
  void refuse(std::uint64_t count) noexcept { refused_ = created_ + count; }
  [[nodiscard]] std::uint64_t requests() const noexcept { return created_; }

 private:
  std::uint64_t created_ = 0;
  std::optional<std::uint64_t> refused_;
};

}  // namespace psplus::sim
