#include "worker/held_segments.hpp"

#include "base/format.hpp"

#include <cerrno>
#include <utility>

#include <unistd.h>

namespace psplus::worker {
namespace {

using store::SegmentHeader;
using store::SegmentKind;

bool belongs_to_a_member(SegmentKind kind) {
  return kind == SegmentKind::kMailbox || kind == SegmentKind::kSlots || kind == SegmentKind::kPull;
}

}  // namespace

Status HeldSegments::add(SegmentId id, UniqueFd fd) {
  SegmentHeader header{};
  if (::pread(fd.get(), &header, sizeof(header), 0) != sizeof(header))
    return Status::from_errno("pread", formatted("segment {}", raw(id)), errno);
  if (header.magic != SegmentHeader::kMagic || header.id != id)
    return {StatusCode::kInternal,
            "a segment has a wrong header; workers and server must run the same psplus version"};
  if (const auto found = segments_.find(id); found != segments_.end()) {
    found->second.counted = true;
    return {};
  }
  Held held{.fd = std::move(fd), .header = header, .mapped = nullptr};
  const bool own = belongs_to_a_member(header.kind) && header.owner == raw(member_) &&
                   header.incarnation == incarnation_;
  if (own || !belongs_to_a_member(header.kind)) {
    auto copy = held.fd.duplicate();
    if (!copy.ok()) return copy.status();
    auto segment = Segment::map(std::move(copy).value(), header.size,
                                own ? Access::kReadWrite : Access::kReadOnly);
    if (!segment.ok()) return segment.status();
    held.mapped = std::make_shared<Segment>(std::move(segment).value());
  }
  segments_.emplace(id, std::move(held));
  return {};
}

void HeldSegments::begin_census() {
  for (auto& [id, held] : segments_) held.counted = held.header.kind == SegmentKind::kControl;
}

void HeldSegments::end_census() {
  std::erase_if(segments_, [](const auto& entry) { return !entry.second.counted; });
}

std::shared_ptr<Segment> HeldSegments::find(SegmentKind kind, ExtentId extent) const {
  for (auto entry = segments_.rbegin(); entry != segments_.rend(); ++entry) {
    const Held& held = entry->second;
    if (held.header.kind != kind || held.mapped == nullptr) continue;
    if (kind != SegmentKind::kMailbox && held.header.extent != raw(extent)) continue;
    return held.mapped;
  }
  return nullptr;
}

std::shared_ptr<Segment> HeldSegments::find(SegmentId id) const {
  const auto found = segments_.find(id);
  return found == segments_.end() ? nullptr : found->second.mapped;
}

std::vector<int> HeldSegments::descriptors() const {
  std::vector<int> fds;
  for (const auto& [id, held] : segments_) fds.push_back(held.fd.get());
  return fds;
}

}  // namespace psplus::worker
