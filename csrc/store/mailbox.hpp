#pragma once

#include <cstdint>

#include "base/futex.hpp"
#include "store/control.hpp"
#include "store/layout.hpp"
#include "store/rule.hpp"

/// The segment through which one worker and its server talk about pushes.
namespace psplus::store {

enum PushFlags : std::uint32_t {
  kPushSet = 1,        ///< the slot holds values that replace the shard's, no step
  kPushEmpty = 2,      ///< a skipped step: counts, carries nothing
  kPushAllParams = 4,  ///< every parameter of its extents is carried; else the slot's bitmap tells
  kPushUndivided = 8,  ///< lambda is the whole scale, whatever the number of workers
};
/// With kPushSet: 0 for values, p for plane p - 1 of the servers' state and the step counts.
inline constexpr int kSetPlaneShift = 4;
inline constexpr std::uint32_t kSetPlaneMask = 3U << kSetPlaneShift;
inline constexpr std::uint32_t kKnownPushFlags =
    kPushSet | kPushEmpty | kPushAllParams | kPushUndivided | kSetPlaneMask;

/// Flags of a push that sets all of a plane of state.
[[nodiscard]] constexpr std::uint32_t set_plane(std::uint32_t plane) noexcept {
  return kPushSet | kPushAllParams | (plane + 1) << kSetPlaneShift;
}
/// What the slot of a kPushSet replaces: 0 for values, else a plane of state, counted from 1.
[[nodiscard]] constexpr std::uint32_t set_area(std::uint32_t flags) noexcept {
  return (flags & kSetPlaneMask) >> kSetPlaneShift;
}

/// What a worker says about a push. A slot holds plain delta; lambda is here.
struct PushDescriptor {
  Word sequence;
  HalfWord epoch;  ///< of the server it was made under
  HalfWord incarnation;
  HalfWord flags;           ///< PushFlags
  HalfWord layout_version;  ///< of the job, by which it has all extents that its worker knows
  Word extents;             ///< bit i: extent i of the stream
  Word lambda;              ///< double; the worker's scale for this push
  Word snapshot_foreign;    ///< foreign steps contained in the snapshot it was computed on
  Word reserved1[2];
};
static_assert(sizeof(PushDescriptor) == 64);

/// What the server says about an applied push.
struct Acknowledgement {
  Word sequence;
  Word staleness;  ///< `actual`: foreign steps between snapshot and application
};

struct MailStream {
  // Written by the worker.
  alignas(64) Word published;  ///< PushMark; compare-and-swap only, the server may close it
  Word cut_requested;          ///< count of requests << 1 | pull buffer
  Word barrier_arrived;        ///< number of the barrier the worker stands at
  PushDescriptor descriptors[kSlots];
  // Written by the server.
  alignas(64) Word applied;  ///< sequence: its slot is free and its change visible
  Word released;             ///< clock up to which the gate is open
  Word cut_done;             ///< last cut_requested that was served
  Word barrier_released;
  Acknowledgement acknowledgements[kSlots];
  WakeWord wake;  ///< rung after any of the words above changed
};

struct MailboxBlock {
  SegmentHeader header;
  alignas(64) Word heartbeat;  ///< counted up by the worker's session thread
  MailStream streams[kMaxStreams];
};

/// One worker's push slots for one extent: two slots behind the segment's header, each a bitmap of
/// carried parameters, where the servers step the options of each parameter, and the values. Sizes
/// come from the layout, never from the segment, which its worker can write.
class SlotsView {
 public:
  SlotsView() = default;
  /// `bytes` has segment_bytes() of the same.
  SlotsView(std::span<std::byte> bytes, const ExtentLayout& layout, Rule rule = {}) noexcept
      : bytes_(bytes),
        bitmap_bytes_(layout.bitmap_bytes()),
        option_count_(rule.steps() ? layout.params().size() : 0),
        value_bytes_(layout.value_bytes()) {}
  [[nodiscard]] static std::size_t segment_bytes(const ExtentLayout& layout,
                                                 Rule rule = {}) noexcept {
    return kPageBytes + kSlots * SlotsView{{}, layout, rule}.slot_bytes();
  }
  [[nodiscard]] explicit operator bool() const noexcept { return !bytes_.empty(); }
  [[nodiscard]] std::span<std::byte> values(Sequence sequence) const noexcept {
    return {slot(sequence) + head_bytes(), value_bytes_};
  }
  [[nodiscard]] std::span<std::uint64_t> bitmap(Sequence sequence) const noexcept {
    return {reinterpret_cast<std::uint64_t*>(slot(sequence)), bitmap_bytes_ / 8};
  }

  /// One for each parameter of the layout; none where the servers do not step.
  [[nodiscard]] std::span<StepOptions> options(Sequence sequence) const noexcept {
    return {reinterpret_cast<StepOptions*>(slot(sequence) + bitmap_bytes_), option_count_};
  }

 private:
  [[nodiscard]] std::size_t head_bytes() const noexcept {
    return round_up(bitmap_bytes_ + option_count_ * sizeof(StepOptions), kPageBytes);
  }
  [[nodiscard]] std::size_t slot_bytes() const noexcept {
    return head_bytes() + round_up(value_bytes_, kPageBytes);
  }
  [[nodiscard]] std::byte* slot(Sequence sequence) const noexcept {
    return bytes_.data() + kPageBytes + raw(sequence) % kSlots * slot_bytes();
  }
  std::span<std::byte> bytes_;
  std::size_t bitmap_bytes_ = 0;
  std::size_t option_count_ = 0;
  std::size_t value_bytes_ = 0;
};

/// Header of a pull segment: two buffers with the cut that each holds.
struct PullHeader {
  struct Cut {
    Word batch;  ///< BatchId at whose end it was taken
    Word total_pushes;
    Word clock[kMaxMembers];
    Word pushes[kMaxMembers];
  };
  SegmentHeader header;
  Cut cuts[2];
};

/// One worker's pull buffers for one extent: whole copies made by the server between two batches.
class PullView {
 public:
  PullView() = default;
  /// `bytes` has segment_bytes(value_bytes).
  PullView(std::span<std::byte> bytes, std::size_t value_bytes) noexcept
      : bytes_(bytes), value_bytes_(value_bytes) {}
  [[nodiscard]] static std::size_t segment_bytes(std::size_t value_bytes) noexcept {
    return round_up(sizeof(PullHeader), kPageBytes) + 2 * round_up(value_bytes, kPageBytes);
  }
  [[nodiscard]] explicit operator bool() const noexcept { return !bytes_.empty(); }
  [[nodiscard]] PullHeader& header() const noexcept {
    return *reinterpret_cast<PullHeader*>(bytes_.data());
  }
  [[nodiscard]] std::span<std::byte> values(std::size_t buffer) const noexcept {
    return {bytes_.data() + round_up(sizeof(PullHeader), kPageBytes) +
                buffer * round_up(value_bytes_, kPageBytes),
            value_bytes_};
  }

 private:
  std::span<std::byte> bytes_;
  std::size_t value_bytes_ = 0;
};

}  // namespace psplus::store
