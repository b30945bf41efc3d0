#include "server/batcher.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "base/format.hpp"
#include "server/gate.hpp"
#include "server/rule_step.hpp"

namespace psplus::server {
namespace {

constexpr std::size_t kRateWindow = 16;

using store::BatchKind;
using store::PushMark;

}  // namespace

std::uint64_t Batcher::pending(StreamId stream, MemberId member) const {
  if (!context_.store.has_mailbox(member)) return 0;
  const auto published = PushMark::unpack(
      context_.store.mail(member, stream).published.load(std::memory_order_acquire));
  const auto dedup = PushMark::unpack(peek(context_.in_stream(stream, member).dedup));
  if (published.incarnation != dedup.incarnation || published.sequence <= dedup.sequence) return 0;
  return raw(published.sequence) - raw(dedup.sequence);
}

std::vector<Batcher::Offence> Batcher::take_offences() { return std::exchange(offences_, {}); }

bool Batcher::read_push(StreamId stream, MemberId member, Sequence sequence, Push& push) {
  const store::PushDescriptor& d =
      context_.store.mail(member, stream).descriptors[raw(sequence) % store::kSlots];
  push = {
      .member = member,
      .incarnation = PushMark::unpack(peek(context_.in_stream(stream, member).dedup)).incarnation,
      .sequence = sequence,
      .flags = peek(d.flags),
      .extents = peek(d.extents),
      .lambda = store::from_word(peek(d.lambda)),
      .snapshot_foreign = peek(d.snapshot_foreign)};
  const std::uint64_t registered = peek(context_.in_stream(stream, member).extents);
  std::string reason;
  if (peek(d.sequence) != raw(sequence) || peek(d.incarnation) != raw(push.incarnation))
    reason = "its sequence or incarnation is not the published one";
  else if (peek(d.layout_version) > peek(context_.control().layout_version))
    reason = formatted("it is of layout version {}, the job is at {}", peek(d.layout_version),
                       peek(context_.control().layout_version));
  else if ((push.flags & ~store::kKnownPushFlags) != 0)
    reason = formatted("its flags {:#x} are unknown", push.flags);
  else if ((push.extents & ~registered) != 0)
    // What it has registered has slots, which everybody holds: a successor can read them too.
    reason = formatted("it carries extents {:#x}, registered are {:#x}", push.extents, registered);
  else if (!std::isfinite(push.lambda))
    reason = "its scale is not finite";
  else
    reason = fault_in_slots(stream, push);
  if (reason.empty()) return true;
  offences_.push_back(
      {member, formatted("push {} on stream {}: {}", raw(sequence), raw(stream), reason)});
  return false;
}

bool Batcher::carries(const Push& push, const LentPush& lent, std::size_t param) {
  return (push.flags & store::kPushAllParams) != 0 ||
         (lent.bitmap[param / 64] >> (param % 64) & 1) != 0;
}

std::string Batcher::fault_in_slots(StreamId stream, const Push& push) const {
  const bool sets = (push.flags & store::kPushSet) != 0;
  const std::uint32_t area = store::set_area(push.flags);
  if (area != 0 && !sets) return formatted("its flags {:#x} do not go together", push.flags);
  if ((push.flags & store::kPushEmpty) != 0) return {};
  const store::StreamEntry& entry = context_.stream(stream);
  for (std::uint32_t e = 0; e < peek(entry.extent_count); ++e) {
    if ((push.extents >> e & 1) == 0) continue;
    const ExtentId extent{peek(entry.extents[e])};
    const store::OwnedShard& shard = context_.store.shard(extent);
    const store::Rule rule = shard.view.rule();
    if (area > rule.planes)
      return formatted("it sets plane {} of extent {}, which has {}", area - 1, e, rule.planes);
    if (!rule.steps() || sets) continue;
    const LentPush lent = context_.pushes.borrow(stream, push.member, push.sequence, extent);
    for (std::size_t p = 0; p < lent.options.size(); ++p) {
      if (!carries(push, lent, p)) continue;
      if (const std::string fault = fault_of(lent.options[p], rule); !fault.empty())
        return formatted("its options of parameter '{}' {}", shard.layout.params()[p].name, fault);
    }
  }
  return {};
}

std::uint32_t Batcher::differing_rank(StreamId stream, const std::vector<Push>& pushes) const {
  const store::StreamEntry& entry = context_.stream(stream);
  std::uint32_t lowest = 0;
  std::vector<std::optional<store::StepOptions>> counting;
  for (std::uint32_t e = 0; e < peek(entry.extent_count); ++e) {
    const ExtentId extent{peek(entry.extents[e])};
    if (!context_.store.shard(extent).view.rule().steps()) continue;
    counting.assign(context_.store.shard(extent).layout.params().size(), std::nullopt);
    for (const Push& push : pushes) {
      if ((push.flags & store::kPushEmpty) != 0 || (push.extents >> e & 1) == 0) continue;
      const LentPush lent = context_.pushes.borrow(stream, push.member, push.sequence, extent);
      const std::uint32_t rank = peek(context_.member(push.member).rank);
      for (std::size_t p = 0; p < counting.size(); ++p) {
        if (!carries(push, lent, p)) continue;
        store::StepOptions own = lent.options[p];
        own.count = 0;  // of sets only
        if (!counting[p])
          counting[p] = own;
        else if (std::memcmp(&*counting[p], &own, sizeof(own)) != 0)
          lowest = lowest == 0 ? rank + 1 : std::min(lowest, rank + 1);
      }
    }
  }
  return lowest;
}

std::vector<Batcher::Push> Batcher::collect(StreamId stream, BatchKind& kind) {
  const auto mode = static_cast<store::Mode>(peek(context_.stream(stream).mode));
  kind = mode == store::Mode::kBsp ? BatchKind::kMean : BatchKind::kAdd;
  bool complete = true;  // BSP: every active member that can step has pushed
  std::vector<Push> pushes;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId member{m};
    const std::uint64_t waiting = pending(stream, member);
    if (waiting == 0 && is_active(context_.control(), stream, member) &&
        !stands_at_barrier(context_.control(), stream, member))
      complete = false;
    if (waiting > store::kSlots) {
      offences_.push_back({member, "it published more pushes than it has slots"});
      continue;
    }
    const auto done = PushMark::unpack(peek(context_.in_stream(stream, member).dedup)).sequence;
    const std::uint64_t take =
        mode == store::Mode::kBsp ? std::min<std::uint64_t>(waiting, 1) : waiting;
    for (std::uint64_t i = 1; i <= take; ++i) {
      Push push{};
      if (!read_push(stream, member, Sequence{raw(done) + i}, push)) break;
      if ((push.flags & store::kPushSet) != 0) {
        // A set is a batch of its own, after everything its member published before it.
        if (i != 1) break;
        kind = BatchKind::kSet;
        return {push};
      }
      if (pushes.size() < context_.config.max_batch_pushes || mode == store::Mode::kBsp)
        pushes.push_back(push);
    }
  }
  if (mode != store::Mode::kBsp) return pushes;
  if (!complete) return {};
  // Rank order makes a step bitwise reproducible, whatever places the members got.
  std::stable_sort(pushes.begin(), pushes.end(), [&](const Push& a, const Push& b) {
    return peek(context_.member(a.member).rank) < peek(context_.member(b.member).rank);
  });
  return pushes;
}

double Batcher::push_rate(StreamId stream, MemberId member) {
  std::deque<TimePoint>& times = times_[{stream, member}];
  times.push_back(context_.now);
  if (times.size() > kRateWindow) times.pop_front();
  const double span = to_seconds(times.back() - times.front());
  return span > 0 ? static_cast<double>(times.size() - 1) / span : 0.0;
}

void Batcher::write_record(StreamId stream, BatchKind kind, const std::vector<Push>& pushes) {
  store::Store& store = context_.store;
  store::BatchRecord& record = context_.control().record;
  const store::StreamEntry& entry = context_.stream(stream);
  const double workers =
      static_cast<double>(std::max(1u, active_count(context_.control(), stream)));
  std::uint64_t total = peek(entry.total_pushes);
  std::map<MemberId, std::pair<std::uint64_t, std::uint64_t>> after;  // clock, pushes

  // No part of the batch: it tells a worker why a step was not what it meant, if it looks in time.
  if (store::StreamEntry& entry = context_.stream(stream);
      kind == BatchKind::kMean && peek(entry.rule) != raw(store::RuleKind::kNone))
    store.put(entry.differing, differing_rank(stream, pushes));
  store.put(record.stream, raw(stream));
  store.put(record.kind, raw(kind));
  store.put(record.count, static_cast<std::uint32_t>(pushes.size()));
  store.put(record.mean_scale, store::to_word(1.0 / static_cast<double>(pushes.size())));
  for (std::size_t i = 0; i < pushes.size(); ++i) {
    const Push& push = pushes[i];
    const store::StreamMember& member = context_.in_stream(stream, push.member);
    auto [counters, first] =
        after.try_emplace(push.member, peek(member.clock), peek(member.pushes));
    auto& [clock, own] = counters->second;
    const std::uint64_t foreign = total - own;
    store::RecordEntry& out = record.entries[i];
    store.put(out.staleness, foreign - std::min(foreign, push.snapshot_foreign));
    std::uint64_t rate = peek(member.rate);
    if (kind != BatchKind::kSet) {
      ++clock, ++own, ++total;
      rate = store::to_word(push_rate(stream, push.member));
    }
    store.put(out.rate, rate);
    store.put(out.member, raw(push.member));
    store.put(out.incarnation, raw(push.incarnation));
    store.put(out.flags, push.flags);
    store.put(out.sequence, raw(push.sequence));
    store.put(out.extents, (push.flags & store::kPushEmpty) != 0 ? 0 : push.extents);
    const bool undivided = (push.flags & store::kPushUndivided) != 0;
    store.put(out.scale, store::to_word(undivided ? push.lambda : push.lambda / workers));
    store.put(out.after_clock, clock);
    store.put(out.after_pushes, own);
  }
  store.put(record.after_total, total);
  // Values last: who provides an extent's first ones has set its state before.
  const bool sets_values = kind == BatchKind::kSet && store::set_area(pushes.front().flags) == 0;
  store.put(record.initialises, sets_values ? peek(record.entries[0].extents) : 0);
  const auto before = store::RecordState::unpack(peek(record.state));
  // Release: whoever sees the batch open sees all of the record.
  store.put(record.state, store::RecordState{next(before.batch), true}.pack(),
            std::memory_order_release);
}

bool Batcher::open_next() {
  for (std::size_t i = 0; i < store::kMaxStreams; ++i) {
    const StreamId stream{static_cast<std::uint16_t>((turn_ + i) % store::kMaxStreams)};
    if (peek(context_.stream(stream).open) == 0) continue;
    auto kind = BatchKind::kAdd;
    const std::vector<Push> pushes = collect(stream, kind);
    if (pushes.empty()) continue;
    turn_ = static_cast<std::uint16_t>((raw(stream) + 1) % store::kMaxStreams);
    write_record(stream, kind, pushes);
    return true;
  }
  return false;
}

}  // namespace psplus::server
