#include "collectives/group.hpp"

#include "base/format.hpp"

#include <sched.h>
#include <unistd.h>

namespace psplus::collectives {
namespace {

// Longer than a hand-over between running processes, shorter than a time slice.
constexpr nanoseconds kSpin = std::chrono::microseconds{50};
constexpr int kLooksPerClock = 64;
// When ranks exceed cores: give the core away this often before sleeping, which costs more.
constexpr int kYields = 4;

std::size_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return static_cast<std::size_t>(CPU_COUNT(&set));
}

constexpr std::uint64_t kOutsider = std::uint64_t{1} << 62;

// The abort word: code in bits 0-7, who gave up in 8-31, because of whom in 32-55, bit 63 set.
std::uint64_t pack(StatusCode code, Rank by, Rank peer) {
  return std::uint64_t{1} << 63 | std::uint64_t{raw(peer)} << 32 | std::uint64_t{raw(by)} << 8 |
         static_cast<std::uint64_t>(code);
}

StatusCode code_of(std::uint64_t word) { return static_cast<StatusCode>(word & 0xff); }
Rank by_of(std::uint64_t word) { return static_cast<Rank>(word >> 8 & 0xff'ffff); }
Rank peer_of(std::uint64_t word) { return static_cast<Rank>(word >> 32 & 0xff'ffff); }

}  // namespace

Group::Group(std::optional<Segment> segment, GroupMemory memory, Rank rank)
    : segment_(std::move(segment)),
      memory_(memory),
      rank_(rank),
      spin_(memory.size() > usable_cores() ? nanoseconds{0} : kSpin) {
  own().pid.store(::getpid(), std::memory_order_relaxed);
  own().presence.store(Presence::attached, std::memory_order_release);
  notify(own().changed);
}

Result<Segment> Group::create_segment(std::size_t size, const Nonce& nonce) {
  auto segment = Segment::create("psplus-group", GroupMemory::bytes_for(size));
  if (segment.ok()) GroupMemory::format(segment->bytes(), size, nonce);
  return segment;
}

Result<std::unique_ptr<Group>> Group::attach(Segment segment, Rank rank, std::size_t size,
                                             const Nonce& nonce) {
  auto memory = GroupMemory::open(segment.bytes(), size, nonce);
  if (!memory.ok()) return memory.status();
  RankWords& words = memory->words(index(rank));
  bool nobody = false;
  if (!words.taken.compare_exchange_strong(nobody, true))
    return Status{StatusCode::kConfig,
                  formatted("rank {} of this group is or was process {} already; start each rank "
                            "once, and make no group with the store of an earlier one",
                            raw(rank), words.pid.load(std::memory_order_relaxed))};
  return std::unique_ptr<Group>{new Group{std::move(segment), *memory, rank}};
}

std::unique_ptr<Group> Group::attach(GroupMemory memory, Rank rank) {
  return std::unique_ptr<Group>{new Group{std::nullopt, memory, rank}};
}

Status Group::connect(Deadline deadline) {
  std::vector<UniqueFd> processes(size());
  for (std::size_t peer = 0; peer < size(); ++peer) {
    if (peer == index(rank_)) continue;
    RankWords& words = memory_.words(peer);
    const bool there = wait_until(words.changed, deadline, [&] {
      return words.presence.load(std::memory_order_acquire) != Presence::expected ||
             memory_.header().aborted.load(std::memory_order_acquire) != 0;
    });
    if (Status aborted = status(); !aborted.ok()) return aborted;
    if (!there)
      return give_up(StatusCode::kTimeout, static_cast<Rank>(peer),
                     formatted("rank {} timed out waiting for rank {} to attach to the group",
                               called(rank_), called(static_cast<Rank>(peer))));
    auto process = open_pidfd(words.pid.load(std::memory_order_relaxed));
    if (process.ok()) processes[peer] = std::move(*process);
  }
  processes_ = std::move(processes);
  return {};
}

void Group::leave() noexcept {
  own().presence.store(Presence::left, std::memory_order_release);
  notify(own().changed);
  for (std::size_t peer = 0; peer < size(); ++peer) notify(memory_.words(peer).messages);
}

void Group::forget() noexcept {
  segment_.reset();
  processes_.clear();
}

void Group::wake_all() noexcept {
  for (std::size_t peer = 0; peer < size(); ++peer) {
    notify(memory_.words(peer).changed);
    notify(memory_.words(peer).messages);
  }
}

void Group::abort() noexcept {
  std::uint64_t none = 0;
  memory_.header().aborted.compare_exchange_strong(none, pack(StatusCode::kClosed, rank_, rank_));
  wake_all();
}

Status Group::give_up(StatusCode code, Rank peer, std::string_view what) {
  std::uint64_t none = 0;
  if (!memory_.header().aborted.compare_exchange_strong(none, pack(code, rank_, peer)))
    return status();
  wake_all();
  return {code, std::string{what}};
}

void Group::give_up_for_outsider(StatusCode code, Rank outsider) noexcept {
  std::uint64_t none = 0;
  memory_.header().aborted.compare_exchange_strong(none, pack(code, rank_, outsider) | kOutsider);
  wake_all();
}

Status Group::status() const {
  const std::uint64_t word = memory_.header().aborted.load(std::memory_order_acquire);
  if (word == 0) return {};
  const StatusCode code = code_of(word);
  const std::uint32_t by = called(by_of(word));
  const std::uint32_t peer = (word & kOutsider) != 0 ? raw(peer_of(word)) : called(peer_of(word));
  switch (code) {
    case StatusCode::kTimeout:
      return {code,
              formatted("the group was given up: rank {} timed out waiting for rank {}", by, peer)};
    case StatusCode::kPeerLost:
      return {code,
              formatted("the group was given up: rank {} found that rank {} is lost", by, peer)};
    case StatusCode::kLayoutMismatch:
      return {code,
              formatted("the group was given up: rank {} and rank {} called different collectives",
                        by, peer)};
    case StatusCode::kClosed:
      return {code, formatted("the group was aborted by rank {}", by)};
    case StatusCode::kOk:
    case StatusCode::kConfig:
    case StatusCode::kNoSpace:
    case StatusCode::kBusy:
    case StatusCode::kInternal:
      break;
  }
  return {StatusCode::kInternal, formatted("the group was given up by rank {}", by)};
}

std::string Group::describe(Rank peer) const {
  return formatted("rank {} (process {})", called(peer),
                   memory_.words(index(peer)).pid.load(std::memory_order_relaxed));
}

std::optional<std::string> Group::why_lost(Rank peer) const {
  if (memory_.words(index(peer)).presence.load(std::memory_order_acquire) == Presence::left)
    return describe(peer) + " has left the group";
  if (processes_.empty() || peer == rank_) return std::nullopt;
  const UniqueFd& process = processes_[index(peer)];
  if (!process || has_exited(process)) return describe(peer) + " has ended";
  return std::nullopt;
}

bool Group::spin_for(const std::atomic<std::uint64_t>& word, std::uint64_t target) const noexcept {
  const auto reached = [&] { return word.load(std::memory_order_acquire) >= target; };
  if (spin_ == nanoseconds{0}) {
    for (int turn = 0; turn < kYields; ++turn) {
      ::sched_yield();
      if (reached()) return true;
    }
    return false;
  }
  const Deadline end = Deadline::after(spin_);
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (reached()) return true;
      relax();
    }
  } while (!end.passed());
  return false;
}

bool Group::watch(Rank peer, const std::atomic<std::uint64_t>& word, std::uint64_t target,
                  Deadline deadline) const {
  WakeWord& bell = memory_.words(index(peer)).changed;
  const auto reached = [&] { return word.load(std::memory_order_acquire) >= target; };
  for (;;) {
    if (wait_until(bell, deadline.at_most(kLivenessInterval), reached)) return true;
    if (deadline.passed() || why_lost(peer) || !status().ok()) return reached();
  }
}

Status Group::await_slowly(Rank peer, const std::atomic<std::uint64_t>& word, std::uint64_t target,
                           std::string_view call, Deadline deadline) {
  if (spin_for(word, target)) return {};
  WakeWord& bell = memory_.words(index(peer)).changed;
  for (;;) {
    const bool woken = wait_until(bell, deadline.at_most(kLivenessInterval), [&] {
      return word.load(std::memory_order_acquire) >= target ||
             memory_.header().aborted.load(std::memory_order_acquire) != 0;
    });
    if (word.load(std::memory_order_acquire) >= target) return {};
    if (woken) return status();
    if (const auto lost = why_lost(peer)) {
      // What it announced before its end counts.
      if (word.load(std::memory_order_acquire) >= target) return {};
      return give_up(StatusCode::kPeerLost, peer, formatted("{} during {}", *lost, call));
    }
    if (deadline.passed())
      return give_up(StatusCode::kTimeout, peer,
                     formatted("{} on rank {}: Timed out waiting for {}", call, called(rank_),
                               describe(peer)));
  }
}

}  // namespace psplus::collectives
