#pragma once

#include "base/segment.hpp"
#include "store/segment_header.hpp"

namespace psplus::shm {

/// Segments in memfds, to be passed to the workers of this host.
class MemfdSource final : public store::SegmentSource {
 public:
  Result<store::SegmentHandle> create(std::string_view label, std::size_t size) override;
};

/// A handle that owns `segment`.
[[nodiscard]] store::SegmentHandle to_handle(Segment segment);

}  // namespace psplus::shm
