#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/store.hpp"

namespace psplus::server {

/// What a push lends to the server for one extent, until it is released.
struct LentPush {
  std::span<const std::byte> values;            ///< laid out as the extent is
  std::span<const std::uint64_t> bitmap;        ///< carried parameters, unless all are
  std::span<const store::StepOptions> options;  ///< by parameter; empty where workers step
};

/// Where the bytes of published pushes lie: in the slots of this host's workers, or in buffers that
/// a network has filled. Nobody copies them before they are applied.
///
/// Thread safety: none; the thread of the core calls.
class PushSource {
 public:
  virtual ~PushSource() = default;
  /// What a push carries of `extent`. The same bytes each time until the push is released; a
  /// successor may ask again for what its predecessor did not release.
  [[nodiscard]] virtual LentPush borrow(StreamId stream, MemberId member, Sequence sequence,
                                        ExtentId extent) = 0;
  /// The member's pushes up to `sequence` are applied, visible and not read any more. In rising
  /// order; a successor repeats the last one. What is never applied is never released: it goes with
  /// its member.
  virtual void release(StreamId stream, MemberId member, Sequence sequence) = 0;
};

/// The push slots of the workers of this host.
class SlotSource final : public PushSource {
 public:
  explicit SlotSource(store::Store& store) noexcept : store_(store) {}
  [[nodiscard]] LentPush borrow(StreamId /*stream*/, MemberId member, Sequence sequence,
                                ExtentId extent) override {
    const store::SlotsView slots = store_.slots(member, extent);
    return {.values = slots.values(sequence),
            .bitmap = slots.bitmap(sequence),
            .options = slots.options(sequence)};
  }
  void release(StreamId stream, MemberId member, Sequence sequence) override {
    // Release: whoever sees its push applied sees the chunks, the counters and the acknowledgement.
    store_.put(store_.mail(member, stream).applied, raw(sequence), std::memory_order_release);
  }

 private:
  store::Store& store_;
};

}  // namespace psplus::server
