#include "server/gate.hpp"

#include <algorithm>
#include <map>
#include <optional>

namespace psplus::server {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

/// Smallest clock, as `clock_of` gives it, among active members that stand at no barrier.
template <class ClockOf>
std::optional<Step> least_of_those_that_step(const store::ControlBlock& control, StreamId stream,
                                             const ClockOf& clock_of) {
  std::optional<Step> least;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId member{m};
    if (!is_active(control, stream, member) || stands_at_barrier(control, stream, member)) continue;
    const Step clock = clock_of(member);
    least = std::min(clock, least.value_or(clock));
  }
  return least;
}

}  // namespace

store::MemberState member_state(const store::ControlBlock& control, MemberId member) {
  return static_cast<store::MemberState>(control.members[index(member)].state.load(kRelaxed));
}

store::StreamMemberState stream_state(const store::StreamEntry& stream, MemberId member) {
  return static_cast<store::StreamMemberState>(stream.members[index(member)].state.load(kRelaxed));
}

bool is_active(const store::ControlBlock& control, StreamId stream, MemberId member) {
  if (member_state(control, member) != store::MemberState::kLive) return false;
  switch (stream_state(control.streams[index(stream)], member)) {
    case store::StreamMemberState::kRegistered:
      return true;
    case store::StreamMemberState::kLeft:
      return false;
    case store::StreamMemberState::kAbsent:
      return control.members[index(member)].founder.load(kRelaxed) == 1;
  }
  return false;
}

std::uint32_t active_count(const store::ControlBlock& control, StreamId stream) {
  std::uint32_t count = 0;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m)
    if (is_active(control, stream, MemberId{m})) ++count;
  return count;
}

bool stands_at_barrier(const store::ControlBlock& control, StreamId stream, MemberId member) {
  const store::StreamEntry& entry = control.streams[index(stream)];
  const auto passed = static_cast<std::uint32_t>(entry.barriers.load(kRelaxed));
  const std::uint32_t arrived = entry.members[index(member)].barrier_arrived.load(kRelaxed);
  return static_cast<std::int32_t>(arrived - passed) > 0;
}

Step gate_clock(const store::ControlBlock& control, StreamId stream, MemberId member) {
  const store::StreamMember& entry = control.streams[index(stream)].members[index(member)];
  return Step{entry.clock.load(kRelaxed) + entry.credit.load(kRelaxed)};
}

Step least_gate_clock(const store::ControlBlock& control, StreamId stream, Step otherwise) {
  const auto least = least_of_those_that_step(
      control, stream, [&](MemberId member) { return gate_clock(control, stream, member); });
  return least.value_or(otherwise);
}

Step greatest_gate_clock(const store::ControlBlock& control, StreamId stream) {
  Step greatest{0};
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m)
    if (is_active(control, stream, MemberId{m}))
      greatest = std::max(greatest, gate_clock(control, stream, MemberId{m}));
  return greatest;
}

Step joining_clock(const store::ControlBlock& control, StreamId stream, Step otherwise) {
  std::map<std::size_t, std::uint64_t> after;  // clocks as the open batch will leave them
  const store::BatchRecord& record = control.record;
  if (store::RecordState::unpack(record.state.load(kRelaxed)).open &&
      record.stream.load(kRelaxed) == raw(stream))
    for (std::uint32_t i = 0; i < record.count.load(kRelaxed); ++i)
      after[record.entries[i].member.load(kRelaxed)] = record.entries[i].after_clock.load(kRelaxed);
  const auto least = least_of_those_that_step(control, stream, [&](MemberId member) {
    const auto found = after.find(index(member));
    if (found == after.end()) return gate_clock(control, stream, member);
    const auto& entry = control.streams[index(stream)].members[index(member)];
    return Step{found->second + entry.credit.load(kRelaxed)};
  });
  if (least) return *least;
  return active_count(control, stream) > 0 ? greatest_gate_clock(control, stream) : otherwise;
}

Step released_step(const store::ControlBlock& control, StreamId stream, MemberId member) {
  const store::StreamEntry& entry = control.streams[index(stream)];
  const Step clock{entry.members[index(member)].clock.load(kRelaxed)};
  const std::uint64_t bound = entry.bound.load(kRelaxed);
  if (static_cast<store::Mode>(entry.mode.load(kRelaxed)) == store::Mode::kBsp ||
      bound == store::kNoBound)
    return clock;
  const std::uint64_t own = raw(gate_clock(control, stream, member));
  const std::uint64_t least = raw(least_gate_clock(control, stream, Step{own}));
  const std::uint64_t ahead = own - std::min(own, least);
  const std::uint64_t held = ahead - std::min(ahead, bound);
  return Step{raw(clock) - std::min(raw(clock), held)};
}

}  // namespace psplus::server
