#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/segment.hpp"
#include "base/status.hpp"
#include "store/segment_header.hpp"

namespace psplus::worker {

/// The segments that a worker holds: the descriptors of all (to hand to a successor of a dead
/// server), mapped only where this worker reads or writes. Not thread-safe; its owner locks.
class HeldSegments {
 public:
  void set_self(MemberId member, Incarnation incarnation) noexcept {
    member_ = member;
    incarnation_ = incarnation;
  }
  /// Takes a segment in; one that is held already stays as it is, and counts in a census.
  Status add(SegmentId id, UniqueFd fd);
  void drop(SegmentId id) { segments_.erase(id); }
  void clear() { segments_.clear(); }
  /// Between these two calls a server offers all segments of the job; what was not among them is
  /// dropped at the end.
  void begin_census();
  void end_census();

  /// This worker's segment of `kind` for `extent` (mailbox, slots, pull): the newest, because a
  /// server that died while it opened a stream may have left one that its successor does not know.
  [[nodiscard]] std::shared_ptr<Segment> find(store::SegmentKind kind, ExtentId extent) const;
  [[nodiscard]] std::shared_ptr<Segment> find(SegmentId id) const;
  [[nodiscard]] std::vector<int> descriptors() const;

 private:
  struct Held {
    UniqueFd fd;
    store::SegmentHeader header;
    std::shared_ptr<Segment> mapped;  ///< unset for other workers' segments
    bool counted = true;
  };
  std::map<SegmentId, Held> segments_;
  MemberId member_{};
  Incarnation incarnation_{};
};

}  // namespace psplus::worker
