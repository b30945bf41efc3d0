#include "worker/stream_start.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/format.hpp"
#include "base/segment.hpp"

namespace psplus::worker {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
/// Of a session, whose heart beats twice a second.
constexpr nanoseconds kSilent = milliseconds{1500};

Result<Segment> segment_with(std::string_view label, std::span<const std::byte> bytes) {
  // At least one byte: an empty memfd cannot be mapped.
  auto segment = Segment::create(label, std::max<std::size_t>(bytes.size(), 1));
  if (segment.ok()) std::copy(bytes.begin(), bytes.end(), segment->bytes().begin());
  return segment;
}

/// Who is attached and who has registered the stream, by rank.
struct Roll {
  std::set<std::uint32_t> registered;
  std::set<std::uint32_t> attached;
  std::map<std::uint32_t, std::uint32_t> gone;  ///< came, and left or died; with the process
};

Roll call_roll(const store::ControlBlock& control, StreamId stream) {
  Roll roll;
  for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
    const store::MemberEntry& member = control.members[m];
    const auto state =
        static_cast<store::MemberState>(member.state.load(std::memory_order_acquire));
    const std::uint32_t rank = member.rank.load(kRelaxed);
    if (state == store::MemberState::kFree && member.incarnation.load(kRelaxed) != 0)
      roll.gone[rank] = member.process.load(kRelaxed);
    if (state != store::MemberState::kLive) continue;
    roll.attached.insert(rank);
    if (static_cast<store::StreamMemberState>(control.streams[index(stream)].members[m].state.load(
            kRelaxed)) == store::StreamMemberState::kRegistered)
      roll.registered.insert(rank);
  }
  for (const std::uint32_t rank : roll.attached) roll.gone.erase(rank);
  return roll;
}

/// An added extent waits for nobody but the sessions that take its descriptors, computing or not.
Status wait_for_sessions(const Session& session, const StreamOptions& options, TimePoint began) {
  const auto waited = Clock::now() - began;
  if (waited < options.timeout) return {};
  const store::ControlBlock& control = session.control();
  std::vector<std::uint32_t> silent;
  for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
    const store::MemberEntry& member = control.members[m];
    const TimePoint sign = from_nanoseconds(member.last_sign_of_life.load(kRelaxed));
    if (static_cast<store::MemberState>(member.state.load(std::memory_order_acquire)) ==
            store::MemberState::kLive &&
        Clock::now() - sign > kSilent)
      silent.push_back(member.rank.load(kRelaxed));
  }
  return {StatusCode::kTimeout,
          formatted("rank {} waited {:.1f} s for a parameter group to be added: every worker that "
                    "is attached must take its memory first{}. Let a stopped process go on, or end "
                    "it",
                    raw(session.options().rank), to_seconds(waited),
                    silent.empty()
                        ? ""
                        : formatted("; rank {} gives no sign of life", joined(silent, ", ")))};
}

}  // namespace

Result<wire::StreamReady> register_extent(Session& session, const StreamOptions& options,
                                          StreamExtent extent, store::Rule rule,
                                          const store::ExtentLayout& layout,
                                          std::span<const std::byte> blob) {
  const auto layout_bytes = layout.serialize();
  const auto layout_segment = segment_with("psplus-layout", layout_bytes);
  if (!layout_segment.ok()) return layout_segment.status();
  const auto blob_segment = segment_with("psplus-blob", blob);
  if (!blob_segment.ok()) return blob_segment.status();
  std::vector<int> fds{layout_segment->fd().get()};
  if (!blob.empty()) fds.push_back(blob_segment->fd().get());

  // Whoever arrives is a sign of life; whoever is attached but still builds its model is slow, not
  // silent.
  TimePoint last_arrival = Clock::now();
  const TimePoint began = last_arrival;
  std::size_t arrived = 0;
  bool told = false;
  const auto still_hopeful = [&]() -> Status {
    if (Status status = session.check_server(began, options.timeout); !status.ok()) return status;
    if (extent != StreamExtent{}) return wait_for_sessions(session, options, began);
    const Roll roll = call_roll(session.control(), options.stream);
    if (roll.attached.size() + roll.registered.size() > arrived) {
      arrived = roll.attached.size() + roll.registered.size();
      last_arrival = Clock::now();
    }
    const std::uint32_t world = session.options().world_size;
    const bool all_attached = roll.attached.size() >= world;
    const auto silent = Clock::now() - last_arrival;
    if (silent < options.timeout) return {};
    constexpr std::size_t kNamed = 20;  // a wrong WORLD_SIZE makes many
    std::vector<std::uint32_t> missing;
    for (std::uint32_t rank = 0; rank < world && missing.size() < kNamed; ++rank)
      if (!roll.registered.contains(rank)) missing.push_back(rank);
    const std::size_t unnamed = world - roll.registered.size() - missing.size();
    const std::string who =
        formatted("rank {}{} {} missing after {:.1f} s without an arrival", joined(missing, ", "),
                  unnamed == 0 ? "" : formatted(" and {} more", unnamed),
                  missing.size() == 1 ? "is" : "are", to_seconds(silent));
    if (all_attached && silent < options.straggler_timeout) {
      if (!std::exchange(told, true))
        session.options().warn(
            formatted("rank {} waits for others to wrap their optimizers; {}, though attached; "
                      "straggler_timeout is {:g} s",
                      raw(session.options().rank), who, to_seconds(options.straggler_timeout)));
      return {};
    }
    std::string fix;
    for (const std::uint32_t rank : missing)
      if (const auto left = roll.gone.find(rank); left != roll.gone.end())
        fix += formatted("Rank {} came as process {} and ended: see what it says. ", rank,
                         left->second);
    if (fix.empty())
      fix =
          "Start all ranks with the same PSPLUS_JOB (or under one torchrun), by one user, with the "
          "same TMPDIR and PSPLUS_HOST_ID, or set WORLD_SIZE to the number of workers";
    return {StatusCode::kTimeout,
            formatted("{} of {} workers joined; {}. {}", roll.registered.size(), world, who, fix)};
  };
  auto answer = session.ask(wire::OpenStream{.stream = options.stream,
                                             .extent = extent,
                                             .mode = options.mode,
                                             .pull = options.pull,
                                             .rule = rule,
                                             .bound = options.bound,
                                             .layout_bytes = layout_bytes.size(),
                                             .blob_bytes = blob.size(),
                                             .has_blob = !blob.empty()},
                            fds, still_hopeful);
  if (!answer.ok()) return answer.status();
  return std::get<wire::StreamReady>(*answer);
}

}  // namespace psplus::worker
