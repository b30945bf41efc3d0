#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "server/context.hpp"

namespace psplus::server {

/// Finds published pushes and writes them, as one batch, into the batch record.
///
/// Invariants: a batch takes each member's pushes in sequence, directly after the last one applied;
/// the record holds the counters as they shall stand afterwards; the record is opened (one release
/// store) only when it is whole, and only when the one before it is closed.
class Batcher {
 public:
  explicit Batcher(Context& context) noexcept : context_(context) {}

  /// Opens the next batch, if any pushes wait that can be applied. Streams take turns.
  [[nodiscard]] bool open_next();
  /// Pushes of `member` on `stream` that are published and not yet applied.
  [[nodiscard]] std::uint64_t pending(StreamId stream, MemberId member) const;
  /// A worker whose descriptor made no sense, with the reason; the roster expels it.
  struct Offence {
    MemberId member;
    std::string reason;
  };
  [[nodiscard]] std::vector<Offence> take_offences();

 private:
  struct Push {
    MemberId member;
    Incarnation incarnation;
    Sequence sequence;
    std::uint32_t flags;
    std::uint64_t extents;
    double lambda;
    std::uint64_t snapshot_foreign;
  };
  [[nodiscard]] std::vector<Push> collect(StreamId stream, store::BatchKind& kind);
  [[nodiscard]] bool read_push(StreamId stream, MemberId member, Sequence sequence, Push& push);
  void write_record(StreamId stream, store::BatchKind kind, const std::vector<Push>& pushes);
  [[nodiscard]] double push_rate(StreamId stream, MemberId member);

  Context& context_;
  std::uint16_t turn_ = 0;
  std::vector<Offence> offences_;
  /// Times of the last pushes, for the rates that learning-rate policies use; lost in a take-over.
  std::map<std::pair<StreamId, MemberId>, std::deque<TimePoint>> times_;
};

}  // namespace psplus::server
