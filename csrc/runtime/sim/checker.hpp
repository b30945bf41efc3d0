#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "runtime/sim/expected_shard.hpp"
#include "runtime/sim/scenario.hpp"
#include "store/control.hpp"
#include "store/mailbox.hpp"
#include "store/shard.hpp"
#include "worker/step_vector.hpp"

namespace psplus::sim {

/// A promise that a history broke.
struct Violation {
  std::string rule;
  std::string text;
};

/// One life of a worker on the job.
struct LifeId {
  MemberId member{};
  Incarnation incarnation{};
  friend auto operator<=>(const LifeId&, const LifeId&) = default;
};

/// A push as its worker meant it.
struct PushFacts {
  std::uint32_t flags = 0;
  double lambda = 1;
  std::uint64_t snapshot_foreign = 0;
  bool initial = false;            ///< a set by the worker that provides an extent's first values
  std::uint64_t extents = 0;       ///< bit i: extent i of the stream is carried
  std::vector<PushValues> values;  ///< by extent; of those that are carried
};

/// Watches a history from outside and keeps its own account of what must be true. It trusts nothing
/// of the server but its words in shared memory, and computes counters and contents by itself.
///
/// Rules, by the names that violations carry: "exactly-once", "order", "record", "counters",
/// "scale", "staleness", "bsp", "bound", "contents", "monotone", "own-push", "cut", "barrier",
/// "initial-values", "join", "closed-queue", "stop", "hang", "protocol".
class Checker {
 public:
  explicit Checker(const Scenario& scenario);

  /// A job begins, with this control segment.
  void begin(store::SegmentHandle control);
  /// Looks at the control segment; called between any two stores of a server.
  void observe();

  // What workers do and see.
  void joined(StreamId stream, LifeId life, const store::MailStream& mail, std::uint64_t barriers);
  void left(StreamId stream, LifeId life);
  void published(StreamId stream, LifeId life, Sequence sequence, PushFacts facts);
  void saw_applied(StreamId stream, LifeId life, Sequence sequence, std::uint64_t staleness);
  void saw_released(StreamId stream, LifeId life, std::uint64_t clock);
  void arrived(StreamId stream, LifeId life, std::uint64_t barrier);
  void passed(StreamId stream, std::uint64_t barrier);

  // What anybody reads.
  /// The batch that a snapshot must at least contain if it begins with `vector`.
  [[nodiscard]] BatchId contained_in(StreamId stream, const worker::StepVector& vector);
  /// The batch that applied a push; 0 when none has.
  [[nodiscard]] BatchId batch_of(StreamId stream, LifeId life, Sequence sequence) const;
  void read_chunk(StreamId stream, StreamExtent extent, ChunkIndex chunk, BatchId batch,
                  std::span<const std::byte> bytes, BatchId at_least);
  /// `views` of the reader's extents, in order: one cut over all of them.
  void read_cut(StreamId stream, MemberId reader, std::span<const store::PullView> views,
                std::size_t buffer, BatchId at_least);

  /// The server has emitted Stop: `present` workers were attached then.
  void stopped(std::size_t present);
  /// Final state of a stream, and of each of its shards.
  void finish(StreamId stream);
  void finish(StreamId stream, StreamExtent extent, const store::ShardView& shard);

  [[nodiscard]] const store::ControlBlock* control() const noexcept { return control_; }
  void fail(std::string_view rule, std::string text);
  [[nodiscard]] const std::optional<Violation>& violation() const noexcept { return violation_; }
  [[nodiscard]] std::uint64_t pushes_applied() const noexcept { return pushes_applied_; }
  [[nodiscard]] bool nothing_published() const noexcept { return pushes_published_ == 0; }
  [[nodiscard]] ExpectedShard& shard(StreamId stream, StreamExtent extent) {
    return streams_[index(stream)].shards[index(extent)];
  }
  /// Mean of the staleness of all steps applied so far whose sequence is above `skip`.
  [[nodiscard]] double mean_staleness(StreamId stream, std::uint64_t skip) const;

 private:
  static constexpr std::size_t kTracked = 16;  ///< member places that a simulation uses
  struct Push {
    PushFacts facts;
    BatchId batch{};
    std::uint64_t staleness = 0;
  };
  struct Life {
    std::vector<Push> pushes;
    std::uint64_t applied = 0;
    const store::MailStream* mail = nullptr;  ///< while it is present
    std::uint64_t arrived = 0;
  };
  struct Counters {
    BatchId batch{};
    std::uint64_t total = 0;
    std::array<std::uint64_t, kTracked> clock{};
    std::array<std::uint64_t, kTracked> pushes{};
  };
  struct Stream {
    std::vector<ExpectedShard> shards;  ///< by extent
    std::uint64_t barriers = 0;         ///< opened so far
    std::map<LifeId, Life> lives;
    Counters now;                   ///< as the last record opened says, by our own account
    std::vector<Counters> history;  ///< after each batch of this stream
    std::array<std::vector<BatchId>, kTracked> batch_of_push;
    std::array<store::StreamMemberState, kTracked> state{};
    std::uint64_t initialised = 0;  ///< bit i: extent i has been given values
  };
  struct Included {
    LifeId life;
    std::uint64_t sequence;
  };

  void watch_registrations();
  void watch_barriers();
  void registered(StreamId id, MemberId member);
  void opened(BatchId batch);
  void opened_set(Stream& stream, BatchId batch);
  void closed(BatchId batch);
  [[nodiscard]] bool include(Stream& stream, BatchId batch, const store::RecordEntry& entry,
                             store::BatchKind kind, std::uint32_t workers);
  void check_step_members(StreamId id, const std::vector<Included>& pushes);
  [[nodiscard]] bool is_active(StreamId stream, std::size_t member) const;
  [[nodiscard]] std::uint32_t active_count(StreamId stream) const;
  /// Whether a member that counts can step: unless it stands at a barrier that is still closed, as
  /// it has said and the server has noted.
  [[nodiscard]] bool can_step(StreamId stream, std::size_t member) const;
  [[nodiscard]] std::uint64_t credit(StreamId stream, std::size_t member) const;
  [[nodiscard]] std::optional<std::uint64_t> least_clock(StreamId stream,
                                                         std::size_t without) const;

  const Scenario& scenario_;
  store::SegmentHandle control_segment_;
  const store::ControlBlock* control_ = nullptr;
  std::vector<Stream> streams_;
  store::RecordState last_state_{};
  StreamId open_stream_{};
  std::vector<Included> open_pushes_;
  std::uint64_t pushes_published_ = 0;
  std::uint64_t pushes_applied_ = 0;
  std::optional<Violation> violation_;
};

}  // namespace psplus::sim
