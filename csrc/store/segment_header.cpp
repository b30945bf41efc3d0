#include "store/segment_header.hpp"

namespace psplus::store {

std::string_view to_string(SegmentKind kind) noexcept {
  switch (kind) {
    case SegmentKind::kControl:
      return "control";
    case SegmentKind::kShard:
      return "shard";
    case SegmentKind::kMailbox:
      return "mailbox";
    case SegmentKind::kSlots:
      return "slots";
    case SegmentKind::kPull:
      return "pull";
    case SegmentKind::kBlob:
      return "blob";
  }
  return "unknown";
}

Status check_header(const SegmentHandle& segment) {
  if (segment.bytes.size() < sizeof(SegmentHeader))
    return {StatusCode::kInternal, "a segment is shorter than its header"};
  const SegmentHeader& header = segment.header();
  if (header.magic != SegmentHeader::kMagic || header.size != segment.bytes.size())
    return {StatusCode::kInternal,
            "a segment has a wrong header; workers and server must run the same psplus version"};
  return {};
}

}  // namespace psplus::store
