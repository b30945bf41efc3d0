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
  [[nodiscard]] static bool carries(const Push& push, const LentPush& lent, std::size_t param);
  /// Why the slots of a push cannot be stepped on, where the servers step; empty when they can.
  [[nodiscard]] std::string fault_in_slots(StreamId stream, const Push& push) const;
  void write_record(StreamId stream, store::BatchKind kind, const std::vector<Push>& pushes);
  /// Lowest rank + 1 of those whose options are not the ones that a BSP step takes; 0: none.
  [[nodiscard]] std::uint32_t differing_rank(StreamId stream,
                                             const std::vector<Push>& pushes) const;
  [[nodiscard]] double push_rate(StreamId stream, MemberId member);

  Context& context_;
  std::uint16_t turn_ = 0;
  std::vector<Offence> offences_;
  /// Times of the last pushes, for the rates that learning-rate policies use; lost in a take-over.
  std::map<std::pair<StreamId, MemberId>, std::deque<TimePoint>> times_;
};

}  // namespace psplus::server
