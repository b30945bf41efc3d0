#include "worker/dense_stream.hpp"

#include <algorithm>
#include <cmath>

#include "server/gate.hpp"

namespace psplus::worker {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

void DenseStream::snapshot(std::span<const void* const> params) {
  for (ExtentPart& part : parts_) part.snapshot(part.own(params));
}

Result<std::int64_t> DenseStream::write_delta(std::span<const void* const> params,
                                              std::span<const std::uint8_t> carried) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  carried_.assign(carried.begin(), carried.end());
  mark_carried();
  std::int64_t first = -1;
  for (const ExtentPart& part : parts_) {
    const std::int64_t bad =
        part.write_delta(part.own(params), part.own(carried), part.slots().values(queue_.next()));
    if (first < 0) first = bad;
  }
  return first;
}

void DenseStream::mark_carried() {
  const std::span<const std::uint8_t> carried{carried_};
  prepared_extents_ = 0;
  bool all = true;
  for (const ExtentPart& part : parts_) {
    const auto own = part.own(carried);
    if (std::all_of(own.begin(), own.end(), [](auto c) { return c == 0; })) continue;
    prepared_extents_ |= part.bit();
    const auto bitmap = part.slots().bitmap(queue_.next());
    std::fill(bitmap.begin(), bitmap.end(), 0);
    for (std::size_t i = 0; i < own.size(); ++i) {
      all = all && own[i] != 0;
      if (own[i] == 0) continue;
      bitmap[i / 64] |= std::uint64_t{1} << (i % 64);
      const store::ParamPlace& place = part.layout().places()[i];
      counters_.bytes_pushed += place.scalar_count * storage_bytes(place.storage);
    }
  }
  // The padding between parameters takes part when a whole extent is applied at once: slots come
  // zeroed and nobody writes it, so it changes nothing.
  prepared_flags_ = 0;
  if (prepared_extents_ == 0)
    prepared_flags_ = store::kPushEmpty;
  else if (all)
    prepared_flags_ = store::kPushAllParams;
}

Status DenseStream::write_nothing() {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  carried_.assign(params_.size(), 0);
  mark_carried();
  return {};
}

std::int64_t DenseStream::first_overflow(double scale) const {
  const auto overflows = [&]<class S>(const std::byte* bytes, std::size_t count) {
    const auto* const values = reinterpret_cast<const S*>(bytes);
    return !std::all_of(values, values + count, [factor = static_cast<S>(scale)](S value) {
      return std::isfinite(factor * value);
    });
  };
  for (const ExtentPart& part : parts_) {
    const auto own = part.own(std::span<const std::uint8_t>{carried_});
    const std::byte* const slot = part.slots().values(queue_.next()).data();
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (own[i] == 0) continue;
      const store::ParamPlace& place = part.layout().places()[i];
      const std::byte* const values = slot + place.byte_offset;
      const bool found = place.storage == Storage::float32
                             ? overflows.operator()<float>(values, place.scalar_count)
                             : overflows.operator()<double>(values, place.scalar_count);
      if (found) return static_cast<std::int64_t>(part.first_param() + i);
    }
  }
  return -1;
}

Status DenseStream::publish(double lambda) {
  if (Status status = publish_push(prepared_flags_, prepared_extents_, lambda); !status.ok())
    return status;
  ++steps_;
  return {};
}

Result<std::int64_t> DenseStream::push_sum(std::span<const void* const> values, double scale,
                                           bool must_be_finite) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  std::int64_t bad = -1;
  for (const ExtentPart& part : parts_) {
    const std::int64_t found = part.widen_into(part.own(values), part.slots().values(queue_.next()),
                                               value_bytes_ >= kStreamingBytes);
    if (bad < 0) bad = found;
  }
  if (bad >= 0 && must_be_finite) return bad;
  carried_.assign(values.size(), 1);
  if (must_be_finite && std::abs(scale) > 1) {
    if (bad = first_overflow(scale); bad >= 0) return bad;
  }
  mark_carried();
  begin_step();
  // Servers subtract.
  if (Status status =
          publish_push(prepared_flags_ | store::kPushUndivided, prepared_extents_, -scale);
      !status.ok())
    return status;
  ++steps_;
  return bad;
}

Status DenseStream::publish_push(std::uint32_t flags, std::uint64_t extents, double lambda) {
  const PushInfo info{.flags = flags,
                      .extents = extents,
                      .lambda = lambda,
                      .snapshot_foreign = computed_on_,
                      .epoch = session_->epoch(),
                      .layout_version = layout_version_};
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
  StepVector now = cut_ ? load_step_vector(parts_.front().pulls().header().cuts[*cut_])
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

void DenseStream::arrive() {
  mail().barrier_arrived.store(barriers_ + 1, std::memory_order_seq_cst);
  session_->ring();
}

Status DenseStream::barrier() {
  const std::uint64_t number = barriers_ + 1;
  arrive();
  const Status passed = wait(
      "the other workers at a barrier",
      [&] { return mail().barrier_released.load(std::memory_order_acquire) >= number; },
      Gate::kBarrier);
  if (passed.ok()) barriers_ = number;  // else the next call stands at this one again
  return passed;
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
