#include "server/registry.hpp"

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "server/gate.hpp"

namespace psplus::server {
namespace {

using store::StreamMemberState;

constexpr StreamId kFirstStream{0};

std::string_view describe(store::RuleKind kind) {
  switch (kind) {
    case store::RuleKind::kNone:
      return "stepped by workers";
    case store::RuleKind::kSgd:
      return "stepped by servers with SGD";
    case store::RuleKind::kAdam:
      return "stepped by servers with Adam";
    case store::RuleKind::kAdagrad:
      return "stepped by servers with Adagrad";
  }
  return "stepped by nobody";
}

std::string describe(store::Mode mode, store::PullMode pull, std::uint64_t bound,
                     store::RuleKind rule) {
  return formatted(
      "{}, {} pull, {}, {}", mode == store::Mode::kBsp ? "bsp" : "asynchronous",
      pull == store::PullMode::kBuffered ? "buffered" : "mapped",
      bound == store::kNoBound ? "no staleness bound" : formatted("staleness bound {}", bound),
      describe(rule));
}

}  // namespace

void Registry::open(ConnectionId from, const wire::OpenStream& request,
                    std::span<const std::byte> layout_bytes, std::span<const std::byte> blob) {
  const auto member = roster_.member_of(from);
  if (!member) return;
  auto layout = store::ExtentLayout::parse(layout_bytes);
  if (!layout.ok()) return roster_.refuse(from, layout.status().code(), layout.status().message());
  const Rank rank{peek(context_.member(*member).rank)};
  Status status = check_order(request, *member);
  if (status.ok())
    status = extent_of(request.stream, request.extent) ? check_same(request, *layout, rank)
                                                       : create_extent(request, *layout);
  refused_.erase(rank);
  if (!status.ok()) {
    refused_[rank] = status;
    return roster_.refuse(from, status.code(), status.message());
  }
  const ExtentId extent = *extent_of(request.stream, request.extent);
  const auto made = make_segments(extent, *member);
  if (!made.ok()) return roster_.refuse(from, made.status().code(), made.status().message());

  std::vector<Applicant>& applicants = applicants_[extent];
  std::erase_if(applicants, [&](const Applicant& applicant) { return applicant.from == from; });
  applicants.push_back({from, {blob.begin(), blob.end()}});
  const auto go_on = [this, extent, from, member = *member] {
    if (roster_.member_of(from) != member) return;
    registered(extent, member);
    answer(extent);
  };
  // Also when all of it was there already: after a take-over others may not hold it yet.
  roster_.when_all_hold(*made, go_on);
}

std::optional<ExtentId> Registry::extent_of(StreamId stream, StreamExtent place) const {
  const store::StreamEntry& entry = context_.stream(stream);
  if (peek(entry.open) == 0 || raw(place) >= peek(entry.extent_count)) return std::nullopt;
  return ExtentId{peek(entry.extents[index(place)])};
}

/// Streams are numbered in the order in which every worker makes them, extents of a stream
/// likewise.
Status Registry::check_order(const wire::OpenStream& request, MemberId member) const {
  const StreamId stream = request.stream;
  const std::uint32_t rank = peek(context_.member(member).rank);
  const store::StreamMemberState state = stream_state(context_.stream(stream), member);
  if (state == StreamMemberState::kLeft)
    return {StatusCode::kClosed,
            formatted("rank {} has closed stream {} already", rank, raw(stream))};
  if (request.extent != StreamExtent{}) {
    const std::uint64_t own = peek(context_.in_stream(stream, member).extents);
    if (state != StreamMemberState::kRegistered || (own >> (raw(request.extent) - 1) & 1) == 0)
      return {StatusCode::kConfig,
              formatted("rank {} registers extent {} of stream {} before extent {}", rank,
                        raw(request.extent), raw(stream), raw(request.extent) - 1)};
  } else if (raw(stream) != 0 &&
             peek(context_.stream(StreamId{static_cast<std::uint16_t>(raw(stream) - 1)}).open) ==
                 0) {
    return {StatusCode::kConfig, formatted("rank {} registers stream {} before stream {}", rank,
                                           raw(stream), raw(stream) - 1)};
  }
  return {};
}

Status Registry::create_extent(const wire::OpenStream& request, const store::ExtentLayout& layout) {
  store::ControlBlock& control = context_.control();
  const std::uint32_t extent = peek(control.layout_version);
  if (extent >= store::kMaxExtents)
    return {StatusCode::kConfig,
            formatted("a job has {} extents at most; wrap fewer optimizers, or add fewer groups",
                      store::kMaxExtents)};
  const ExtentId id{static_cast<std::uint16_t>(extent)};
  const bool is_first = request.extent == StreamExtent{};
  if (const std::uint32_t kind = peek(context_.stream(request.stream).rule);
      !is_first && raw(request.rule.kind) != kind)
    return {StatusCode::kConfig,
            formatted("a group added to wrapper {} is {}, the wrapper is {}; an added group is "
                      "stepped as the others are",
                      raw(request.stream), describe(request.rule.kind),
                      describe(static_cast<store::RuleKind>(kind)))};
  const auto shard = context_.store.create_shard(id, layout, request.rule);
  if (!shard.ok()) return shard.status();
  roster_.offer(*shard);
  store::ExtentEntry& entry = control.extents[extent];
  store::StreamEntry& stream = context_.stream(request.stream);
  store::Store& store = context_.store;
  store.put(entry.stream, raw(request.stream));
  store.put(entry.place, raw(request.extent));
  store.put(entry.shard_segment, raw(*shard));
  store.put(entry.initialised, 0);
  store.put(entry.provider, 0);
  if (is_first) {
    store.put(stream.mode, raw(request.mode));
    store.put(stream.pull, raw(request.pull));
    store.put(stream.bound, request.bound);
    store.put(stream.rule, raw(request.rule.kind));
    store.put(stream.total_pushes, 0);
    store.put(stream.barriers, 0);
  }
  store.put(stream.extents[index(request.extent)], raw(id));
  // Opened extent first: a successor that finds it in its stream finds its shard open too.
  store.put(entry.open, 1, std::memory_order_release);
  store.put(control.layout_version, extent + 1, std::memory_order_release);
  store.put(stream.extent_count, raw(request.extent) + 1u, std::memory_order_release);
  if (is_first) store.put(stream.open, 1, std::memory_order_release);
  return {};
}

Status Registry::check_same(const wire::OpenStream& request, const store::ExtentLayout& layout,
                            Rank rank) const {
  const store::StreamEntry& stream = context_.stream(request.stream);
  const auto mode = static_cast<store::Mode>(peek(stream.mode));
  const auto pull = static_cast<store::PullMode>(peek(stream.pull));
  const auto kind = static_cast<store::RuleKind>(peek(stream.rule));
  if (mode != request.mode || pull != request.pull || peek(stream.bound) != request.bound ||
      kind != request.rule.kind)
    return {StatusCode::kConfig,
            formatted("wrapper {} is {} on rank {}, but {} in the job; use the same scheme on "
                      "every rank",
                      raw(request.stream),
                      describe(request.mode, request.pull, request.bound, request.rule.kind),
                      raw(rank), describe(mode, pull, peek(stream.bound), kind))};
  const ExtentId extent = *extent_of(request.stream, request.extent);
  if (const store::Rule rule = context_.store.shard(extent).view.rule(); rule != request.rule)
    return {StatusCode::kConfig,
            formatted("rank {} needs {} value(s) of state for each parameter value, the job keeps "
                      "{}; give the optimizer the same options (momentum, amsgrad) on every rank",
                      raw(rank), request.rule.planes, rule.planes)};
  const Status same = store::match_layouts(context_.store.shard(extent).layout, layout, rank);
  if (same.ok()) return same;
  if (request.extent != StreamExtent{})
    return {same.code(),
            formatted("parameter group {} of those added to wrapper {}: {}; add the same groups, "
                      "in the same order, on every rank",
                      raw(request.extent), raw(request.stream), same.message())};
  if (const std::uint32_t added = peek(stream.extent_count) - 1; added != 0)
    return {same.code(), formatted("{}; the job added {} parameter group(s) after wrapping, so "
                                   "this rank must wrap without them and add them too",
                                   same.message(), added)};
  return same;
}

Result<SegmentId> Registry::make_segments(ExtentId extent, MemberId member) {
  SegmentId last = context_.store.slots_id(member, extent);
  if (last == SegmentId{}) {
    const auto slots = context_.store.create_slots(member, context_.incarnation_of(member), extent);
    if (!slots.ok()) return slots.status();
    roster_.offer(*slots);
    last = *slots;
  }
  if (static_cast<store::PullMode>(peek(context_.stream(stream_id_of(extent)).pull)) ==
      store::PullMode::kMapped)
    return last;
  const auto pull = make_pull(extent, member);
  if (!pull.ok()) return pull.status();
  return std::max(last, *pull);
}

Result<SegmentId> Registry::make_pull(ExtentId extent, MemberId member) {
  if (const SegmentId held = context_.store.pull_id(member, extent); held != SegmentId{})
    return held;
  const auto pull = context_.store.create_pull(member, context_.incarnation_of(member), extent);
  if (pull.ok()) roster_.offer(*pull);
  return pull;
}

void Registry::need_pull(ConnectionId from, StreamId stream) {
  const auto member = roster_.member_of(from);
  if (!member || peek(context_.stream(stream).open) == 0) return;
  SegmentId last{};
  for (std::uint16_t i = 0; i < store::kMaxStreamExtents; ++i) {
    const auto extent = extent_of(stream, StreamExtent{i});
    if (!extent) break;
    if (!has_registered(*extent, *member)) continue;
    const auto made = make_pull(*extent, *member);
    if (!made.ok()) return roster_.refuse(from, made.status().code(), made.status().message());
    last = std::max(last, *made);
  }
  roster_.when_all_hold(last, [this, from, stream] {
    context_.emit(Send{from, wire::PullReady{stream}, {}});
  });
}

/// Everybody holds the member's segments: from here a successor finds them, so it may push.
void Registry::registered(ExtentId extent, MemberId member) {
  store::Store& store = context_.store;
  const StreamId stream = stream_id_of(extent);
  const std::uint64_t bit = std::uint64_t{1} << peek(entry_of(extent).place);
  store::StreamMember& entry = context_.in_stream(stream, member);
  const bool is_new = stream_state(context_.stream(stream), member) == StreamMemberState::kAbsent;
  if (!is_new) {  // one extent more, or asked again after a take-over
    if ((peek(entry.extents) & bit) == 0)
      store.put(entry.extents, peek(entry.extents) | bit, std::memory_order_release);
    return;
  }
  const Incarnation life = context_.incarnation_of(member);
  const Step clock = joining_clock(context_.control(), stream, Step{peek(entry.clock)});
  store.put(entry.extents, bit);
  store.put(entry.dedup, store::PushMark{life, Sequence{0}}.pack());
  store.put(entry.clock, raw(clock));
  store.put(entry.credit, 0);
  store.put(entry.barrier_arrived,
            static_cast<std::uint32_t>(peek(context_.stream(stream).barriers)));
  store.put(entry.rate, 0);
  store::MailStream& mail = store.mail(member, stream);
  store.put(mail.released, raw(clock));
  store.put(mail.barrier_arrived, peek(context_.stream(stream).barriers));
  store.put(mail.barrier_released, peek(context_.stream(stream).barriers));
  store.put(entry.state, raw(StreamMemberState::kRegistered), std::memory_order_release);
}

bool Registry::founding_is_complete() const {
  const store::ControlBlock& control = context_.control();
  std::uint32_t count = 0;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m)
    if (member_state(control, MemberId{m}) == store::MemberState::kLive &&
        stream_state(control.streams[0], MemberId{m}) == StreamMemberState::kRegistered)
      ++count;
  return count >= peek(control.world_size);
}

void Registry::found() {
  store::ControlBlock& control = context_.control();
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m)
    if (member_state(control, MemberId{m}) == store::MemberState::kLive)
      context_.store.put(control.members[m].founder, 1);
  context_.store.put(control.founded, 1, std::memory_order_release);
}

bool Registry::is_initialised(ExtentId extent) const {
  return peek(entry_of(extent).initialised) != 0;
}

/// Whether `member` may push the extent.
bool Registry::has_registered(ExtentId extent, MemberId member) const {
  const StreamId stream = stream_id_of(extent);
  return stream_state(context_.stream(stream), member) == StreamMemberState::kRegistered &&
         (peek(context_.in_stream(stream, member).extents) >> peek(entry_of(extent).place) & 1) !=
             0;
}

/// The worker that is to set the extent's first values, if it still can: it takes part in the
/// stream, or its published pushes are still being applied.
std::optional<MemberId> Registry::provider(ExtentId extent) const {
  const store::ExtentEntry& entry = entry_of(extent);
  const std::uint32_t place = peek(entry.provider);
  if (place == 0) return std::nullopt;
  const MemberId member{static_cast<std::uint16_t>(place - 1)};
  const store::MemberState state = member_state(context_.control(), member);
  const bool here = state == store::MemberState::kLive || state == store::MemberState::kDraining;
  if (!here || peek(context_.member(member).incarnation) != peek(entry.provider_incarnation))
    return std::nullopt;
  const StreamId stream = stream_id_of(extent);
  if (stream_state(context_.stream(stream), member) != StreamMemberState::kLeft) return member;
  const auto published = store::PushMark::unpack(
      context_.store.mail(member, stream).published.load(std::memory_order_acquire));
  const auto applied = store::PushMark::unpack(peek(context_.in_stream(stream, member).dedup));
  if (published.sequence <= applied.sequence) return std::nullopt;
  return member;
}

/// The lowest rank that has registered: rank 0 when a job begins, else whoever came first.
bool Registry::choose_provider(ExtentId extent) {
  std::optional<MemberId> chosen;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId candidate{m};
    if (member_state(context_.control(), candidate) != store::MemberState::kLive ||
        !has_registered(extent, candidate))
      continue;
    if (!chosen || peek(context_.member(candidate).rank) < peek(context_.member(*chosen).rank))
      chosen = candidate;
  }
  if (!chosen) return false;
  store::ExtentEntry& entry = entry_of(extent);
  context_.store.put(entry.provider_incarnation, peek(context_.member(*chosen).incarnation));
  context_.store.put(entry.provider, raw(*chosen) + 1u, std::memory_order_release);
  return true;
}

void Registry::settle_providers() {
  if (peek(context_.control().founded) == 0) return;
  for (std::uint16_t e = 0; e < store::kMaxExtents; ++e) {
    const ExtentId extent{e};
    if (peek(entry_of(extent).open) == 0) break;
    if (is_initialised(extent) || provider(extent) || !choose_provider(extent)) continue;
    // It was told that somebody else would.
    const MemberId member = *provider(extent);
    if (const auto connection = roster_.connection_of(member))
      send_ready(*connection, extent, member);
  }
}

void Registry::give_up_on_refused() {
  if (peek(context_.control().founded) != 0) return refused_.clear();
  for (const auto& [rank, status] : refused_) {
    if (roster_.is_attached(rank)) continue;  // it may correct what is wrong and register again
    for (auto& [extent, applicants] : applicants_) {
      for (const Applicant& applicant : applicants)
        roster_.refuse(applicant.from, status.code(),
                       formatted("the job cannot begin, as rank {} was refused and has ended: {}",
                                 raw(rank), status.message()));
      applicants.clear();
    }
  }
}

void Registry::remind(ConnectionId connection) {
  const auto member = roster_.member_of(connection);
  if (!member) return;
  for (std::uint16_t e = 0; e < store::kMaxExtents; ++e) {
    const ExtentId extent{e};
    if (peek(entry_of(extent).open) == 0) break;
    // Also when its values are on their way: it looks whether they are there before it sends more.
    if (!is_initialised(extent) && provider(extent) == member)
      send_ready(connection, extent, *member);
  }
}

void Registry::answer(ExtentId extent) {
  store::ControlBlock& control = context_.control();
  if (peek(control.founded) == 0) {
    if (stream_id_of(extent) != kFirstStream || !founding_is_complete()) return;
    found();
    for (const auto& [other, waiting] : applicants_)
      if (other != extent) answer(other);
  }
  if (!is_initialised(extent) && !provider(extent)) static_cast<void>(choose_provider(extent));
  std::vector<Applicant>& applicants = applicants_[extent];
  if (provider(extent) && context_.store.blob(extent) == SegmentId{}) {
    const auto own = std::find_if(applicants.begin(), applicants.end(), [&](const Applicant& a) {
      return roster_.member_of(a.from) == provider(extent);
    });
    if (own != applicants.end() && !own->blob.empty()) {
      const auto blob = context_.store.create_blob(extent, own->blob);
      if (!blob.ok()) {
        for (const Applicant& a : applicants)
          roster_.refuse(a.from, blob.status().code(), blob.status().message());
        applicants.clear();
        return;
      }
      roster_.offer(*blob);
      // Held by everybody before anybody relies on it, as all else.
      return roster_.when_all_hold(*blob, [this, extent] { answer(extent); });
    }
  }
  std::vector<Applicant> later;
  for (Applicant& applicant : applicants) {
    const auto member = roster_.member_of(applicant.from);
    if (!member) continue;
    if (has_registered(extent, *member))
      send_ready(applicant.from, extent, *member);
    else
      later.push_back(std::move(applicant));
  }
  applicants = std::move(later);
}

void Registry::send_ready(ConnectionId to, ExtentId extent, MemberId member) {
  const store::ExtentEntry& entry = entry_of(extent);
  const StreamId stream = stream_id_of(extent);
  const bool initialised = is_initialised(extent);
  wire::StreamReady ready{.stream = stream,
                          .extent = StreamExtent{static_cast<std::uint16_t>(peek(entry.place))},
                          .provides = !initialised && provider(extent) == member,
                          .rejoined = initialised,
                          .clock = Step{peek(context_.in_stream(stream, member).clock)},
                          .barriers = peek(context_.stream(stream).barriers),
                          .blob_segment = context_.store.blob(extent)};
  context_.emit(Send{to, ready, {}});
}

void Registry::close(ConnectionId from, StreamId stream) {
  const auto member = roster_.member_of(from);
  if (!member || peek(context_.stream(stream).open) == 0) return;
  const bool asked_before = std::any_of(
      closings_.begin(), closings_.end(),
      [&](const Closing& closing) { return closing.from == from && closing.stream == stream; });
  if (asked_before) return;  // by a call that has timed out since
  store::Store& store = context_.store;
  store.before_write();
  store.mail(*member, stream)
      .published.fetch_or(store::PushMark::kClosed, std::memory_order_acq_rel);
  store.put(context_.in_stream(stream, *member).state, raw(StreamMemberState::kLeft),
            std::memory_order_release);
  closings_.push_back({from, stream, *member});
}

void Registry::answer_closes(const std::function<bool(StreamId, MemberId)>& drained) {
  std::erase_if(closings_, [&](const Closing& closing) {
    if (roster_.member_of(closing.from) != closing.member) return true;
    if (!drained(closing.stream, closing.member)) return false;
    context_.emit(Send{closing.from, wire::StreamClosed{closing.stream}, {}});
    return true;
  });
}

void Registry::advance_barriers() {
  const store::ControlBlock& control = context_.control();
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s) {
    const StreamId stream{s};
    if (peek(context_.stream(stream).open) == 0) break;
    bool complete = true;
    bool anybody = false;
    for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
      if (!is_active(control, stream, MemberId{m})) continue;
      anybody = true;
      const std::uint64_t arrived =
          context_.store.mail(MemberId{m}, stream).barrier_arrived.load(std::memory_order_acquire);
      store::HalfWord& shown = context_.in_stream(stream, MemberId{m}).barrier_arrived;
      if (peek(shown) != static_cast<std::uint32_t>(arrived))
        context_.store.put(shown, static_cast<std::uint32_t>(arrived));
      complete = complete && stands_at_barrier(control, stream, MemberId{m});
    }
    if (complete && anybody) open_barrier(stream);
  }
}

/// Credits before the count: until it is raised all still stand, so gates see either none of them
/// or all, and a successor that finds the count as it was gives the credits again.
void Registry::open_barrier(StreamId stream) {
  const store::ControlBlock& control = context_.control();
  const Step level = greatest_gate_clock(control, stream);
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    if (!is_active(control, stream, MemberId{m})) continue;
    store::StreamMember& entry = context_.in_stream(stream, MemberId{m});
    const std::uint64_t credit = raw(level) - peek(entry.clock);
    if (credit != peek(entry.credit)) context_.store.put(entry.credit, credit);
  }
  const std::uint64_t number = peek(context_.stream(stream).barriers) + 1;
  context_.store.put(context_.stream(stream).barriers, number);
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    if (!is_active(control, stream, MemberId{m})) continue;
    context_.store.put(context_.store.mail(MemberId{m}, stream).barrier_released, number,
                       std::memory_order_release);
    context_.emit(Wake{MemberId{m}, stream});
  }
}

}  // namespace psplus::server
