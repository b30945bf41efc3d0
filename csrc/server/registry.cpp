#include "server/registry.hpp"

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "server/gate.hpp"

namespace psplus::server {
namespace {

using store::StreamMemberState;

constexpr StreamId kFirstStream{0};

std::string describe(store::Mode mode, store::PullMode pull, std::uint64_t bound) {
  return formatted(
      "{}, {} pull, {}", mode == store::Mode::kBsp ? "bsp" : "asynchronous",
      pull == store::PullMode::kBuffered ? "buffered" : "mapped",
      bound == store::kNoBound ? "no staleness bound" : formatted("staleness bound {}", bound));
}

}  // namespace

void Registry::open(ConnectionId from, const wire::OpenStream& request,
                    std::span<const std::byte> layout_bytes, std::span<const std::byte> blob) {
  const auto member = roster_.member_of(from);
  if (!member) return;
  const Rank rank{peek(context_.member(*member).rank)};
  const StreamId stream = request.stream;
  auto layout = store::ExtentLayout::parse(layout_bytes);
  if (!layout.ok()) return roster_.refuse(from, layout.status().code(), layout.status().message());
  Status status;
  if (stream_state(context_.stream(stream), *member) == StreamMemberState::kLeft) {
    status = {StatusCode::kClosed,
              formatted("rank {} has closed stream {} already", raw(rank), raw(stream))};
  } else if (peek(context_.stream(stream).open) == 0) {
    if (raw(stream) != 0 &&
        peek(context_.stream(StreamId{static_cast<std::uint16_t>(raw(stream) - 1)}).open) == 0)
      status = {StatusCode::kConfig, formatted("rank {} registers stream {} before stream {}",
                                               raw(rank), raw(stream), raw(stream) - 1)};
    else
      status = create_stream(request, *layout);
  } else {
    status = check_same(request, *layout, rank);
  }
  if (!status.ok()) return roster_.refuse(from, status.code(), status.message());
  const auto made = make_segments(stream, *member);
  if (!made.ok()) return roster_.refuse(from, made.status().code(), made.status().message());

  std::vector<Applicant>& applicants = applicants_[stream];
  std::erase_if(applicants, [&](const Applicant& applicant) { return applicant.from == from; });
  applicants.push_back({from, {blob.begin(), blob.end()}});
  const auto go_on = [this, stream, from, member = *member] {
    if (roster_.member_of(from) != member) return;
    registered(stream, member);
    answer(stream);
  };
  // Also when all of it was there already: after a take-over others may not hold it yet.
  roster_.when_all_hold(*made, go_on);
}

Status Registry::create_stream(const wire::OpenStream& request, const store::ExtentLayout& layout) {
  store::ControlBlock& control = context_.control();
  const std::uint32_t extent = peek(control.layout_version);
  if (extent >= store::kMaxExtents)
    return {StatusCode::kConfig,
            formatted("a job has {} extents at most; wrap fewer optimizers", store::kMaxExtents)};
  const ExtentId id{static_cast<std::uint16_t>(extent)};
  const auto shard = context_.store.create_shard(id, layout);
  if (!shard.ok()) return shard.status();
  roster_.offer(*shard);
  store::ExtentEntry& entry = control.extents[extent];
  store::StreamEntry& stream = context_.stream(request.stream);
  store::Store& store = context_.store;
  store.put(entry.stream, raw(request.stream));
  store.put(entry.shard_segment, raw(*shard));
  store.put(entry.initialised, 0);
  store.put(stream.mode, raw(request.mode));
  store.put(stream.pull, raw(request.pull));
  store.put(stream.bound, request.bound);
  store.put(stream.total_pushes, 0);
  store.put(stream.barriers, 0);
  store.put(stream.extents[0], raw(id));
  store.put(stream.extent_count, 1);
  // Opened extent first: a successor that finds the stream open finds its shard open too.
  store.put(entry.open, 1, std::memory_order_release);
  store.put(control.layout_version, extent + 1, std::memory_order_release);
  store.put(stream.open, 1, std::memory_order_release);
  return {};
}

Status Registry::check_same(const wire::OpenStream& request, const store::ExtentLayout& layout,
                            Rank rank) const {
  const store::StreamEntry& stream = context_.stream(request.stream);
  const auto mode = static_cast<store::Mode>(peek(stream.mode));
  const auto pull = static_cast<store::PullMode>(peek(stream.pull));
  if (mode != request.mode || pull != request.pull || peek(stream.bound) != request.bound)
    return {StatusCode::kConfig,
            formatted("wrapper {} is {} on rank {}, but {} in the job; use the same scheme on "
                      "every rank",
                      raw(request.stream), describe(request.mode, request.pull, request.bound),
                      raw(rank), describe(mode, pull, peek(stream.bound)))};
  return store::match_layouts(context_.store.shard(ExtentId{peek(stream.extents[0])}).layout,
                              layout, rank);
}

Result<SegmentId> Registry::make_segments(StreamId stream, MemberId member) {
  const store::StreamEntry& entry = context_.stream(stream);
  const Incarnation life = context_.incarnation_of(member);
  SegmentId last{};
  for (std::uint32_t i = 0; i < peek(entry.extent_count); ++i) {
    const ExtentId extent{peek(entry.extents[i])};
    if (const SegmentId held = context_.store.slots_id(member, extent); held != SegmentId{}) {
      last = std::max(last, held);
      continue;
    }
    const auto slots = context_.store.create_slots(member, life, extent);
    if (!slots.ok()) return slots.status();
    roster_.offer(*slots);
    last = std::max(last, *slots);
  }
  if (static_cast<store::PullMode>(peek(entry.pull)) == store::PullMode::kMapped) return last;
  const auto pull = make_pull(stream, member);
  if (!pull.ok()) return pull.status();
  return std::max(last, *pull);
}

Result<SegmentId> Registry::make_pull(StreamId stream, MemberId member) {
  const store::StreamEntry& entry = context_.stream(stream);
  const Incarnation life = context_.incarnation_of(member);
  SegmentId last{};
  for (std::uint32_t i = 0; i < peek(entry.extent_count); ++i) {
    const ExtentId extent{peek(entry.extents[i])};
    if (const SegmentId held = context_.store.pull_id(member, extent); held != SegmentId{}) {
      last = std::max(last, held);
      continue;
    }
    const auto pull = context_.store.create_pull(member, life, extent);
    if (!pull.ok()) return pull.status();
    roster_.offer(*pull);
    last = std::max(last, *pull);
  }
  return last;
}

void Registry::need_pull(ConnectionId from, StreamId stream) {
  const auto member = roster_.member_of(from);
  if (!member || peek(context_.stream(stream).open) == 0) return;
  const auto made = make_pull(stream, *member);
  if (!made.ok()) return roster_.refuse(from, made.status().code(), made.status().message());
  roster_.when_all_hold(*made, [this, from, stream] {
    context_.emit(Send{from, wire::PullReady{stream}, {}});
  });
}

void Registry::registered(StreamId stream, MemberId member) {
  store::Store& store = context_.store;
  store::StreamMember& entry = context_.in_stream(stream, member);
  if (stream_state(context_.stream(stream), member) != StreamMemberState::kAbsent)
    return;  // asked again after a take-over
  const Incarnation life = context_.incarnation_of(member);
  const Step clock = joining_clock(context_.control(), stream, Step{peek(entry.clock)});
  store.put(entry.dedup, store::PushMark{life, Sequence{0}}.pack());
  store.put(entry.clock, raw(clock));
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

bool Registry::is_initialised(StreamId stream) const {
  const store::StreamEntry& entry = context_.stream(stream);
  for (std::uint32_t i = 0; i < peek(entry.extent_count); ++i)
    if (peek(context_.control().extents[peek(entry.extents[i])].initialised) == 0) return false;
  return true;
}

/// The worker that is to set the stream's first values, if it still can: it is alive, or its
/// published pushes are still being applied.
std::optional<MemberId> Registry::provider(StreamId stream) const {
  const store::StreamEntry& entry = context_.stream(stream);
  const std::uint32_t place = peek(entry.provider);
  if (place == 0) return std::nullopt;
  const MemberId member{static_cast<std::uint16_t>(place - 1)};
  const store::MemberState state = member_state(context_.control(), member);
  const bool here = state == store::MemberState::kLive || state == store::MemberState::kDraining;
  if (!here || peek(context_.member(member).incarnation) != peek(entry.provider_incarnation))
    return std::nullopt;
  return member;
}

/// The lowest rank that has registered: rank 0 when a job begins, else whoever came first.
bool Registry::choose_provider(StreamId stream) {
  std::optional<MemberId> chosen;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId candidate{m};
    if (member_state(context_.control(), candidate) != store::MemberState::kLive ||
        stream_state(context_.stream(stream), candidate) != StreamMemberState::kRegistered)
      continue;
    if (!chosen || peek(context_.member(candidate).rank) < peek(context_.member(*chosen).rank))
      chosen = candidate;
  }
  if (!chosen) return false;
  store::StreamEntry& entry = context_.stream(stream);
  context_.store.put(entry.provider_incarnation, peek(context_.member(*chosen).incarnation));
  context_.store.put(entry.provider, raw(*chosen) + 1u, std::memory_order_release);
  return true;
}

void Registry::settle_providers() {
  if (peek(context_.control().founded) == 0) return;
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s) {
    const StreamId stream{s};
    if (peek(context_.stream(stream).open) == 0) break;
    if (is_initialised(stream) || provider(stream) || !choose_provider(stream)) continue;
    // It was told that somebody else would.
    const MemberId member = *provider(stream);
    if (const auto connection = roster_.connection_of(member))
      send_ready(*connection, stream, member);
  }
}

void Registry::remind(ConnectionId connection) {
  const auto member = roster_.member_of(connection);
  if (!member) return;
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s) {
    const StreamId stream{s};
    if (peek(context_.stream(stream).open) == 0) break;
    if (is_initialised(stream) || provider(stream) != member) continue;
    // Who has published on the stream knows: its values are on their way.
    const auto published = store::PushMark::unpack(
        context_.store.mail(*member, stream).published.load(std::memory_order_acquire));
    if (published.sequence == Sequence{0}) send_ready(connection, stream, *member);
  }
}

void Registry::answer(StreamId stream) {
  store::ControlBlock& control = context_.control();
  if (peek(control.founded) == 0) {
    if (stream != kFirstStream || !founding_is_complete()) return;
    found();
    for (std::uint16_t later = 1; later < store::kMaxStreams; ++later)
      if (applicants_.contains(StreamId{later})) answer(StreamId{later});
  }
  if (!is_initialised(stream) && !provider(stream)) static_cast<void>(choose_provider(stream));
  std::vector<Applicant>& applicants = applicants_[stream];
  if (provider(stream) && context_.store.blob(stream) == SegmentId{}) {
    const auto own = std::find_if(applicants.begin(), applicants.end(), [&](const Applicant& a) {
      return roster_.member_of(a.from) == provider(stream);
    });
    if (own != applicants.end() && !own->blob.empty()) {
      const auto blob = context_.store.create_blob(stream, own->blob);
      if (!blob.ok()) {
        for (const Applicant& a : applicants)
          roster_.refuse(a.from, blob.status().code(), blob.status().message());
        applicants.clear();
        return;
      }
      roster_.offer(*blob);
    }
  }
  std::vector<Applicant> later;
  for (Applicant& applicant : applicants) {
    const auto member = roster_.member_of(applicant.from);
    if (!member) continue;
    if (stream_state(context_.stream(stream), *member) == StreamMemberState::kRegistered)
      send_ready(applicant.from, stream, *member);
    else
      later.push_back(std::move(applicant));
  }
  applicants = std::move(later);
}

void Registry::send_ready(ConnectionId to, StreamId stream, MemberId member) {
  const bool initialised = is_initialised(stream);
  wire::StreamReady ready{.stream = stream,
                          .provides = !initialised && provider(stream) == member,
                          .rejoined = initialised,
                          .clock = Step{peek(context_.in_stream(stream, member).clock)},
                          .barriers = peek(context_.stream(stream).barriers),
                          .blob_segment = context_.store.blob(stream)};
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
    const std::uint64_t next = peek(context_.stream(stream).barriers) + 1;
    bool complete = true;
    bool anybody = false;
    for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
      if (!is_active(control, stream, MemberId{m})) continue;
      anybody = true;
      const std::uint64_t arrived =
          context_.store.mail(MemberId{m}, stream).barrier_arrived.load(std::memory_order_acquire);
      complete = complete && arrived >= next;
      store::HalfWord& shown = context_.in_stream(stream, MemberId{m}).barrier_arrived;
      if (peek(shown) != static_cast<std::uint32_t>(arrived))
        context_.store.put(shown, static_cast<std::uint32_t>(arrived));
    }
    if (!complete || !anybody) continue;
    context_.store.put(context_.stream(stream).barriers, next);
    for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
      if (!is_active(control, stream, MemberId{m})) continue;
      context_.store.put(context_.store.mail(MemberId{m}, stream).barrier_released, next,
                         std::memory_order_release);
      context_.emit(Wake{MemberId{m}, stream});
    }
  }
}

}  // namespace psplus::server
