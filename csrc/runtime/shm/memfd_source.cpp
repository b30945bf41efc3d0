#include "runtime/shm/memfd_source.hpp"

#include <memory>

namespace psplus::shm {

store::SegmentHandle to_handle(Segment segment) {
  auto owner = std::make_shared<const Segment>(std::move(segment));
  return {.bytes = owner->bytes(), .owner = owner, .fd = owner->fd().get()};
}

Result<store::SegmentHandle> MemfdSource::create(std::string_view label, std::size_t size) {
  auto segment = Segment::create(label, size);
  if (!segment.ok()) return segment.status();
  return to_handle(std::move(segment).value());
}

}  // namespace psplus::shm
