#pragma once

#include <cstdint>

#include "base/ids.hpp"
#include "store/limits.hpp"
#include "store/rule.hpp"
#include "store/segment_header.hpp"
#include "store/words.hpp"

/// The control segment: what a server knows about its job. Written by the server alone, read by its
/// workers and by the successor of a killed server. No pointers; every word is atomic.
namespace psplus::store {

enum class MemberState : std::uint32_t {
  kFree = 0,
  kJoining = 1,  ///< its mailbox is being passed around; a successor forgets it
  kLive = 2,
  kDraining = 3,  ///< closed or dead; its published pushes are still being applied
};

struct MemberEntry {
  HalfWord state;  ///< MemberState; stored last when a member joins
  HalfWord rank;
  HalfWord incarnation;
  HalfWord process;  ///< process id, for messages
  HalfWord mailbox_segment;
  HalfWord founder;  ///< 1: among the WORLD_SIZE workers that started the job
  std::atomic<std::int64_t> last_sign_of_life;  ///< monotonic nanoseconds
  Word reserved[4];
};
static_assert(sizeof(MemberEntry) == 64);

/// How pushes of a stream are batched and replies released.
enum class Mode : std::uint32_t {
  kAsync = 0,  ///< ASP, SSP and PS+: applied on arrival, divided by the number of workers
  kBsp = 1,    ///< one push of every worker, summed in rank order
};

enum class PullMode : std::uint32_t { kMapped = 0, kBuffered = 1 };

inline constexpr std::uint64_t kNoBound = ~std::uint64_t{0};

enum class StreamMemberState : std::uint32_t {
  kAbsent = 0,
  kRegistered = 1,  ///< counts for gates, N and BSP steps
  kLeft = 2,        ///< closed this stream, or died
};

struct StreamMember {
  HalfWord state;            ///< StreamMemberState
  HalfWord barrier_arrived;  ///< low bits of the barrier it stands at or has passed; for messages
  Word dedup;                ///< PushMark of the last push applied
  Word clock;                ///< steps applied; a joiner enters where the others are
  Word credit;               ///< steps that barriers have added to its gate clock
  Word pushes;               ///< steps ever applied for this member's rank
  Word rate;                 ///< pushes a second over its last 16, a double by its bits
  Word extents;              ///< bit i: it has registered extent i, and may push it
};
static_assert(sizeof(StreamMember) == 56);

struct StreamEntry {
  HalfWord open;          ///< 1 once the fields below hold; stored last
  HalfWord mode;          ///< Mode
  HalfWord pull;          ///< PullMode
  HalfWord extent_count;  ///< raised when the new extent is whole
  HalfWord rule;          ///< RuleKind; how much state there is depends on the extent
  HalfWord differing;     ///< rank + 1 of who had other options than counted in the last BSP step
  Word bound;             ///< staleness bound in steps, or kNoBound
  Word total_pushes;      ///< steps applied, all members
  Word barriers;          ///< barriers completed
  std::atomic<std::uint16_t> extents[kMaxStreamExtents];  ///< ExtentIds, append-only
  StreamMember members[kMaxMembers];
};

struct ExtentEntry {
  HalfWord open;         ///< 1 once its shard exists; stored last
  HalfWord initialised;  ///< 1 once it holds somebody's values
  HalfWord shard_segment;
  HalfWord stream;
  HalfWord place;     ///< StreamExtent
  HalfWord provider;  ///< member place + 1 of whose values it begins with; 0: none yet
  HalfWord provider_incarnation;
  HalfWord reserved;
};
static_assert(sizeof(ExtentEntry) == 32);

enum class BatchKind : std::uint32_t {
  kAdd = 0,   ///< W -= sum over pushes of scale * delta, one after the other; or a step for each
  kMean = 1,  ///< W -= scale * (sum of deltas), or one step on that gradient: BSP
  kSet = 2,   ///< W, or a plane of state, = values: initial values and publish()
};

/// One push of a batch, with the counters as they shall stand afterwards: a successor that finishes
/// the batch stores values, it never increments.
struct RecordEntry {
  std::atomic<std::uint16_t> member;
  std::atomic<std::uint16_t> incarnation;
  HalfWord flags;  ///< PushFlags
  Word sequence;
  Word extents;  ///< bit i: extent i of the stream is carried
  Word scale;    ///< double: lambda / N, or lambda alone (kPushUndivided)
  Word after_clock;
  Word after_pushes;
  Word staleness;  ///< foreign steps between its snapshot and its application
  Word rate;       ///< double
};
static_assert(sizeof(RecordEntry) == 64);

struct BatchRecord {
  Word state;  ///< RecordState
  HalfWord stream;
  HalfWord kind;  ///< BatchKind
  HalfWord count;
  HalfWord reserved;
  Word mean_scale;   ///< double: 1 / pushes of a kMean batch
  Word after_total;  ///< stream's total_pushes
  Word initialises;  ///< bit i: extent i of the stream is initialised afterwards
  RecordEntry entries[kMaxBatchPushes];
};

struct ControlBlock {
  SegmentHeader header;
  HalfWord ready;  ///< 1 once this block is whole; stored last
  HalfWord epoch;
  HalfWord world_size;
  HalfWord server_process;
  HalfWord next_segment;
  HalfWord next_incarnation;
  HalfWord layout_version;  ///< extents opened so far
  HalfWord founded;         ///< 1 once world_size workers have registered the first stream
  alignas(
      64) std::atomic<std::int64_t> last_sign_of_life;  ///< of the server, monotonic nanoseconds
  alignas(64) HalfWord server_sleeps;                   ///< 1: publishers must ring the doorbell
  alignas(64) BatchRecord record;
  MemberEntry members[kMaxMembers];
  ExtentEntry extents[kMaxExtents];
  StreamEntry streams[kMaxStreams];
};

}  // namespace psplus::store
