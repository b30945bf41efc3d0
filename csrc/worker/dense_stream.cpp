#include "worker/dense_stream.hpp"

#include <algorithm>
#include <cstring>

#include "base/format.hpp"
#include "base/futex.hpp"
#include "kernels/kernels.hpp"
#include "server/gate.hpp"
#include "worker/stream_start.hpp"

namespace psplus::worker {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

DenseStream::DenseStream(std::shared_ptr<Session> session, StreamOptions options,
                         store::ExtentLayout layout)
    : session_(std::move(session)), options_(options), layout_(std::move(layout)) {}

Result<std::unique_ptr<DenseStream>> DenseStream::open(std::shared_ptr<Session> session,
                                                       StreamOptions options,
                                                       store::ExtentLayout layout,
                                                       std::span<const std::byte> blob) {
  const auto ready = register_stream(*session, options, layout, blob);
  if (!ready.ok()) return ready.status();
  std::unique_ptr<DenseStream> stream{
      new DenseStream(std::move(session), options, std::move(layout))};
  stream->rejoined_ = ready->rejoined;
  stream->base_clock_ = raw(ready->clock);
  stream->barriers_ = ready->barriers;
  if (ready->blob_segment != SegmentId{})
    stream->blob_segment_ = stream->session_->segment(ready->blob_segment);
  if (Status status = stream->attach_views(); !status.ok()) return status;
  return stream;
}

Status DenseStream::attach_views() {
  extent_ = ExtentId{entry().extents[0].load(kRelaxed)};
  shard_segment_ = session_->segment(
      SegmentId{session_->control().extents[index(extent_)].shard_segment.load(kRelaxed)});
  slots_segment_ = session_->segment(store::SegmentKind::kSlots, extent_);
  pull_segment_ = session_->segment(store::SegmentKind::kPull, extent_);
  if (shard_segment_ == nullptr || slots_segment_ == nullptr)
    return {StatusCode::kInternal, "the server opened a stream without its segments"};
  shard_ = store::ShardView{shard_segment_->bytes()};
  slots_ = store::SlotsView{slots_segment_->bytes(), layout_.bitmap_bytes(), layout_.value_bytes()};
  if (pull_segment_ != nullptr)
    pulls_ = store::PullView{pull_segment_->bytes(), layout_.value_bytes()};
  if (Status status = shard_.check(); !status.ok()) return status;
  if (shard_.header().chunk_count != layout_.chunk_count())
    return {StatusCode::kInternal, "the shard's size is not that of the layout"};
  queue_ = PushQueue{mail(), session_->incarnation()};
  seen_ = load_step_vector(session_->control(), options_.stream);
  return {};
}

std::span<const std::byte> DenseStream::blob() const noexcept {
  if (blob_segment_ == nullptr) return {};
  return blob_segment_->bytes().subspan(store::kPageBytes);
}

Status DenseStream::publish_values(std::span<const void* const> params) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  widen_into(params, slots_.values(queue_.next()), false);
  if (Status status = publish_flags(store::kPushSet | store::kPushAllParams, 1.0); !status.ok())
    return status;
  counters_.bytes_pushed += layout_.value_bytes();
  return wait_applied();
}

Result<bool> DenseStream::wait_initialised() {
  const auto initialised = [&] {
    return session_->control().extents[index(extent_)].initialised.load(
               std::memory_order_acquire) == 1;
  };
  const Status status =
      wait("the first worker's values", [&] { return initialised() || provides(); });
  if (!status.ok()) return status;
  return initialised();
}

void DenseStream::snapshot(std::span<const void* const> params) {
  before_.resize(layout_.value_bytes());
  widen_into(params, before_, false);
}

std::int64_t DenseStream::widen_into(std::span<const void* const> params,
                                     std::span<std::byte> values, bool streams) const {
  std::int64_t bad = -1;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const store::ParamPlace& place = layout_.places()[i];
    with_storage(place.storage, [&]<class S>(S) {
      const bool finite = kernels::best().of<S>().widen(
          layout_.params()[i].dtype, params[i],
          reinterpret_cast<S*>(values.data() + place.byte_offset), place.scalar_count, streams);
      if (!finite && bad < 0) bad = static_cast<std::int64_t>(i);
    });
  }
  return bad;
}

Result<std::int64_t> DenseStream::write_delta(std::span<const void* const> params,
                                              std::span<const std::uint8_t> carried) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  const auto values = slots_.values(queue_.next());
  carried_.assign(carried.begin(), carried.end());
  mark_carried();
  std::int64_t bad = -1;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (carried_[i] == 0) continue;
    const store::ParamPlace& place = layout_.places()[i];
    with_storage(place.storage, [&]<class S>(S) {
      const bool finite = kernels::best().of<S>().delta(
          layout_.params()[i].dtype, reinterpret_cast<const S*>(before_.data() + place.byte_offset),
          params[i], reinterpret_cast<S*>(values.data() + place.byte_offset), place.scalar_count);
      if (!finite && bad < 0) bad = static_cast<std::int64_t>(i);
    });
  }
  return bad;
}

void DenseStream::mark_carried() {
  const auto bitmap = slots_.bitmap(queue_.next());
  std::fill(bitmap.begin(), bitmap.end(), 0);
  for (std::size_t i = 0; i < carried_.size(); ++i) {
    if (carried_[i] == 0) continue;
    bitmap[i / 64] |= std::uint64_t{1} << (i % 64);
    const store::ParamPlace& place = layout_.places()[i];
    counters_.bytes_pushed += place.scalar_count * storage_bytes(place.storage);
  }
  const bool all = std::all_of(carried_.begin(), carried_.end(), [](auto c) { return c != 0; });
  const bool none = std::all_of(carried_.begin(), carried_.end(), [](auto c) { return c == 0; });
  // The padding between parameters takes part when the whole extent is applied at once: slots come
  // zeroed and nobody writes it, so it changes nothing.
  prepared_flags_ = 0;
  if (none)
    prepared_flags_ = store::kPushEmpty;
  else if (all)
    prepared_flags_ = store::kPushAllParams;
}

Status DenseStream::write_nothing() {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  carried_.assign(layout_.params().size(), 0);
  prepared_flags_ = store::kPushEmpty;
  return {};
}

Status DenseStream::publish(double lambda) {
  if (Status status = publish_flags(prepared_flags_, lambda); !status.ok()) return status;
  ++steps_;
  return {};
}

Result<std::int64_t> DenseStream::push_sum(std::span<const void* const> values, double scale,
                                           bool must_be_finite) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  const bool streams = layout_.value_bytes() >= kStreamingBytes;
  const std::int64_t bad = widen_into(values, slots_.values(queue_.next()), streams);
  if (bad >= 0 && must_be_finite) return bad;
  carried_.assign(values.size(), 1);
  mark_carried();
  begin_step();
  // Servers subtract.
  if (Status status = publish_flags(prepared_flags_ | store::kPushUndivided, -scale); !status.ok())
    return status;
  ++steps_;
  return bad;
}

Status DenseStream::publish_flags(std::uint32_t flags, double lambda) {
  const store::ControlBlock& control = session_->control();
  const PushInfo info{.flags = flags,
                      .extents = (flags & store::kPushEmpty) != 0 ? 0u : 1u,
                      .lambda = lambda,
                      .snapshot_foreign = computed_on_,
                      .layout_version = control.layout_version.load(std::memory_order_acquire),
                      .epoch = session_->epoch()};
  if (Status status = queue_.publish(info); !status.ok()) {
    const Status failed = session_->failure();
    return failed.ok() ? status : failed;
  }
  session_->ring();
  return {};
}

Status DenseStream::wait_round(std::uint64_t lag) {
  if (steps_ < lag + 1) return {};
  const std::uint64_t target = base_clock_ + steps_ - lag;
  const Status status = wait("its pushes to be applied and released",
                             [&] { return raw(queue_.released()) >= target; });
  const bool refreshed = lag == 0 && refreshed_at_ == steps_;  // newer than the reply
  if (status.ok() && options_.pull == store::PullMode::kBuffered && !refreshed)
    cut_ = static_cast<std::uint32_t>(target % 2);
  return status;
}

Status DenseStream::observe() {
  if (options_.pull == store::PullMode::kBuffered && !cut_)
    if (Status status = request_cut(); !status.ok()) return status;
  StepVector now = cut_ ? load_step_vector(pulls_.header().cuts[*cut_])
                        : load_step_vector(session_->control(), options_.stream);
  const MemberId self = session_->member();
  const std::uint64_t before = seen_.foreign(self);
  observed_ = now.foreign(self) - std::min(before, now.foreign(self));
  seen_ = std::move(now);
  return {};
}

Observation DenseStream::observation() const {
  Observation result;
  result.observed = observed_;
  result.step = steps_ + 1;
  if (const Sequence applied = queue_.applied(); steps_ > 0 && raw(applied) > 0)
    result.actual = queue_.staleness_of(applied);
  result.num_workers = server::active_count(session_->control(), options_.stream);
  result.step_vector = by_rank(seen_.clock);
  std::vector<std::uint64_t> rates(store::kMaxMembers);
  for (std::size_t m = 0; m < store::kMaxMembers; ++m)
    rates[m] = entry().members[m].rate.load(kRelaxed);
  for (const std::uint64_t word : by_rank(rates)) result.rates.push_back(store::from_word(word));
  return result;
}

std::vector<std::uint64_t> DenseStream::step_vector() const {
  return by_rank(load_step_vector(session_->control(), options_.stream).clock);
}

std::vector<std::uint64_t> DenseStream::by_rank(const std::vector<std::uint64_t>& members) const {
  std::vector<std::uint64_t> ranks(session_->options().world_size, 0);
  const store::ControlBlock& control = session_->control();
  for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
    if (control.members[m].incarnation.load(kRelaxed) == 0) continue;
    const std::uint32_t rank = control.members[m].rank.load(kRelaxed);
    if (rank < ranks.size()) ranks[rank] = members[m];
  }
  return ranks;
}

Status DenseStream::barrier() {
  ++barriers_;
  mail().barrier_arrived.store(barriers_, std::memory_order_seq_cst);
  session_->ring();
  return wait(
      "the other workers at a barrier",
      [&] { return mail().barrier_released.load(std::memory_order_acquire) >= barriers_; },
      Gate::kBarrier);
}

Status DenseStream::close(nanoseconds timeout) {
  if (left_) return {};
  closed_ = true;
  const Deadline deadline = Deadline::after(timeout);
  const auto answer = session_->ask(wire::CloseStream{options_.stream}, {}, [&]() -> Status {
    if (!deadline.passed()) return {};
    return {StatusCode::kTimeout, "the last pushes were not applied in time"};
  });
  left_ = answer.ok();  // else it can be tried again
  return answer.ok() ? Status{} : answer.status();
}

}  // namespace psplus::worker
