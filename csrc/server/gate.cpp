#include "server/gate.hpp"

#include <algorithm>
#include <map>
#include <optional>

namespace psplus::server {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

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

Step min_clock(const store::ControlBlock& control, StreamId stream, Step otherwise) {
  bool found = false;
  Step least = otherwise;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    if (!is_active(control, stream, MemberId{m})) continue;
    const Step clock{control.streams[index(stream)].members[m].clock.load(kRelaxed)};
    least = found ? std::min(least, clock) : clock;
    found = true;
  }
  return least;
}

Step joining_clock(const store::ControlBlock& control, StreamId stream, Step otherwise) {
  std::map<std::size_t, Step> after;
  const store::BatchRecord& record = control.record;
  if (store::RecordState::unpack(record.state.load(kRelaxed)).open &&
      record.stream.load(kRelaxed) == raw(stream))
    for (std::uint32_t i = 0; i < record.count.load(kRelaxed); ++i)
      after[record.entries[i].member.load(kRelaxed)] =
          Step{record.entries[i].after_clock.load(kRelaxed)};
  std::optional<Step> least;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    if (!is_active(control, stream, MemberId{m})) continue;
    Step clock{control.streams[index(stream)].members[m].clock.load(kRelaxed)};
    if (const auto found = after.find(m); found != after.end()) clock = found->second;
    least = least ? std::min(*least, clock) : clock;
  }
  return least.value_or(otherwise);
}

Step released_step(const store::ControlBlock& control, StreamId stream, MemberId member) {
  const store::StreamEntry& entry = control.streams[index(stream)];
  const Step clock{entry.members[index(member)].clock.load(kRelaxed)};
  const std::uint64_t bound = entry.bound.load(kRelaxed);
  if (static_cast<store::Mode>(entry.mode.load(kRelaxed)) == store::Mode::kBsp ||
      bound == store::kNoBound)
    return clock;
  const std::uint64_t least = raw(min_clock(control, stream, clock));
  return least > ~std::uint64_t{0} - bound ? clock : std::min(clock, Step{least + bound});
}

}  // namespace psplus::server
