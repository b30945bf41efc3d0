#pragma once

#include <cstdint>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "store/mailbox.hpp"

namespace psplus::worker {

/// What a worker says about a push when it publishes it.
struct PushInfo {
  std::uint32_t flags = 0;    ///< store::PushFlags
  std::uint64_t extents = 0;  ///< bit i: extent i of the stream
  double lambda = 1.0;
  std::uint64_t snapshot_foreign = 0;  ///< foreign steps in the snapshot it was computed on
  Epoch epoch{};
  std::uint32_t layout_version = 0;  ///< by which the job has all extents that the worker knows
};

/// A worker's end of the asynchronous push queue of one stream: two slots, published by one
/// compare-and-swap, so a push exists whole or not at all and survives the death of its worker.
///
/// Invariant: a slot does not change from its publication until `applied` has reached its sequence.
/// Thread safety: none; the thread that steps uses it. Nothing here waits.
class PushQueue {
 public:
  PushQueue() = default;
  /// Goes on after what this worker has published on the stream, if anything: a stream may be
  /// opened again by a caller whose first attempt failed half way.
  PushQueue(store::MailStream& mail, Incarnation incarnation) noexcept
      : mail_(&mail),
        incarnation_(incarnation),
        next_(psplus::next(
            store::PushMark::unpack(mail.published.load(std::memory_order_relaxed)).sequence)) {}

  /// Sequence of the push that is being prepared; its slot is `next() % kSlots`.
  [[nodiscard]] Sequence next() const noexcept { return next_; }
  /// Whether the slot of `next()` may be written.
  [[nodiscard]] bool slot_is_free() const noexcept {
    return raw(applied()) + store::kSlots >= raw(next_);
  }
  /// Publishes `next()`. kClosed when the server has closed the queue: the push has not happened.
  Status publish(const PushInfo& info);

  /// Last sequence that is applied and visible.
  [[nodiscard]] Sequence applied() const noexcept {
    // Pairs with the release store that follows the chunks and counters of its batch.
    return Sequence{mail_->applied.load(std::memory_order_acquire)};
  }
  [[nodiscard]] bool all_applied() const noexcept { return raw(applied()) + 1 >= raw(next_); }
  /// Step up to which replies are released.
  [[nodiscard]] Step released() const noexcept {
    return Step{mail_->released.load(std::memory_order_acquire)};
  }
  /// Staleness that the server reported for push `sequence`, one of the last two applied.
  [[nodiscard]] std::uint64_t staleness_of(Sequence sequence) const noexcept;
  [[nodiscard]] bool closed() const noexcept;

 private:
  store::MailStream* mail_ = nullptr;
  Incarnation incarnation_{};
  Sequence next_{1};
};

}  // namespace psplus::worker
