#include "worker/push_queue.hpp"

namespace psplus::worker {

Status PushQueue::publish(const PushInfo& info) {
  constexpr auto kRelaxed = std::memory_order_relaxed;  // ordered by the compare-and-swap below
  store::PushDescriptor& d = mail_->descriptors[raw(next_) % store::kSlots];
  d.sequence.store(raw(next_), kRelaxed);
  d.epoch.store(raw(info.epoch), kRelaxed);
  d.incarnation.store(raw(incarnation_), kRelaxed);
  d.flags.store(info.flags, kRelaxed);
  d.layout_version.store(info.layout_version, kRelaxed);
  d.extents.store(info.extents, kRelaxed);
  d.lambda.store(store::to_word(info.lambda), kRelaxed);
  d.snapshot_foreign.store(info.snapshot_foreign, kRelaxed);
  std::uint64_t before = store::PushMark{incarnation_, Sequence{raw(next_) - 1}}.pack();
  // Release: whoever sees the push published sees its slot and descriptor. Sequentially consistent,
  // because the publisher then looks whether the server sleeps (see Doorbell).
  if (!mail_->published.compare_exchange_strong(before, store::PushMark{incarnation_, next_}.pack(),
                                                std::memory_order_seq_cst))
    return {StatusCode::kClosed,
            "the server expelled this worker and closed its queue; the push did not happen"};
  next_ = psplus::next(next_);
  return {};
}

std::uint64_t PushQueue::staleness_of(Sequence sequence) const noexcept {
  return mail_->acknowledgements[raw(sequence) % store::kSlots].staleness.load(
      std::memory_order_relaxed);
}

bool PushQueue::closed() const noexcept {
  return (mail_->published.load(std::memory_order_acquire) & store::PushMark::kClosed) != 0;
}

}  // namespace psplus::worker
