#include "worker/extent_part.hpp"

#include <utility>

#include "kernels/kernels.hpp"
#include "store/limits.hpp"

namespace psplus::worker {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

Result<ExtentPart> ExtentPart::attach(const Session& session, const wire::StreamReady& ready,
                                      store::ExtentLayout layout, std::size_t first_param) {
  const store::ControlBlock& control = session.control();
  ExtentPart part{std::move(layout)};
  part.place_ = ready.extent;
  part.first_param_ = first_param;
  part.id_ =
      ExtentId{control.streams[index(ready.stream)].extents[index(ready.extent)].load(kRelaxed)};
  part.shard_segment_ =
      session.segment(SegmentId{control.extents[index(part.id_)].shard_segment.load(kRelaxed)});
  part.slots_segment_ = session.segment(store::SegmentKind::kSlots, part.id_);
  if (part.shard_segment_ == nullptr || part.slots_segment_ == nullptr)
    return Status{StatusCode::kInternal, "the server opened a stream without its segments"};
  if (ready.blob_segment != SegmentId{}) part.blob_segment_ = session.segment(ready.blob_segment);
  part.shard_ = store::ShardView{part.shard_segment_->bytes()};
  if (Status status = part.shard_.check(); !status.ok()) return status;
  part.slots_ = store::SlotsView{part.slots_segment_->bytes(), part.layout_, part.shard_.rule()};
  part.find_pulls(session);
  if (!part.shard_.fits(part.layout_))
    return Status{StatusCode::kInternal, "the shard's size is not that of the layout"};
  return part;
}

bool ExtentPart::find_pulls(const Session& session) {
  if (pulls_) return true;
  pull_segment_ = session.segment(store::SegmentKind::kPull, id_);
  if (pull_segment_ == nullptr) return false;
  pulls_ = store::PullView{pull_segment_->bytes(), layout_.value_bytes()};
  return true;
}

bool ExtentPart::is_initialised(const Session& session) const noexcept {
  return session.control().extents[index(id_)].initialised.load(std::memory_order_acquire) == 1;
}

std::span<const std::byte> ExtentPart::blob() const noexcept {
  if (blob_segment_ == nullptr) return {};
  return blob_segment_->bytes().subspan(store::kPageBytes);
}

std::int64_t ExtentPart::widen_into(std::span<const void* const> own_params,
                                    std::span<std::byte> values, bool streams) const {
  std::int64_t bad = -1;
  for (std::size_t i = 0; i < own_params.size(); ++i) {
    if (own_params[i] == nullptr) continue;
    const store::ParamPlace& place = layout_.places()[i];
    with_storage(place.storage, [&]<class S>(S) {
      const bool finite = kernels::best().of<S>().widen(
          layout_.params()[i].dtype, own_params[i],
          reinterpret_cast<S*>(values.data() + place.byte_offset), place.scalar_count, streams);
      if (!finite && bad < 0) bad = static_cast<std::int64_t>(first_param_ + i);
    });
  }
  return bad;
}

void ExtentPart::snapshot(std::span<const void* const> own_params) {
  before_.resize(layout_.value_bytes());
  widen_into(own_params, before_, false);
}

std::int64_t ExtentPart::write_delta(std::span<const void* const> own_params,
                                     std::span<const std::uint8_t> own_carried,
                                     std::span<std::byte> values) const {
  std::int64_t bad = -1;
  for (std::size_t i = 0; i < own_params.size(); ++i) {
    if (own_carried[i] == 0) continue;
    const store::ParamPlace& place = layout_.places()[i];
    with_storage(place.storage, [&]<class S>(S) {
      const bool finite = kernels::best().of<S>().delta(
          layout_.params()[i].dtype, reinterpret_cast<const S*>(before_.data() + place.byte_offset),
          own_params[i], reinterpret_cast<S*>(values.data() + place.byte_offset),
          place.scalar_count);
      if (!finite && bad < 0) bad = static_cast<std::int64_t>(first_param_ + i);
    });
  }
  return bad;
}

}  // namespace psplus::worker
