#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "base/ids.hpp"
#include "base/segment.hpp"
#include "base/status.hpp"
#include "collectives/group_memory.hpp"

namespace psplus::collectives {

/// One rank's membership of a group whose ranks share memory.
///
/// Once a rank gave up waiting for another (time-out, death, different calls), the group is aborted
/// for all: data of that call is lost, so nothing later could be right. Every call then fails at
/// once with the reason.
///
/// Thread safety: collectives are called by one thread at a time, in the same order on each rank;
/// `abort`, `status` and the words for messages may be used from any thread meanwhile.
class Group {
 public:
  /// Makes the memory of a new group, for the one rank that the others get it from.
  static Result<Segment> create_segment(std::size_t size, const Nonce& nonce);

  /// Joins the group in `segment`, made by `create_segment` in this or another process. Errors:
  /// kLayoutMismatch for another group's memory, kConfig when the rank has been taken before.
  static Result<std::unique_ptr<Group>> attach(Segment segment, Rank rank, std::size_t size,
                                               const Nonce& nonce);
  /// The same for memory that the caller keeps alive: ranks that are threads of one process.
  static std::unique_ptr<Group> attach(GroupMemory memory, Rank rank);

  /// Waits until all ranks have attached, and takes hold of their processes, so that death is seen.
  Status connect(Deadline deadline);

  /// Tells the others that this rank will take part in nothing any more. Idempotent.
  void leave() noexcept;

  /// In a forked child: lets go of the memory and the descriptors without telling anybody. Nothing
  /// else may be called afterwards.
  void forget() noexcept;

  /// Gives the group up on all ranks, waiting ones included. Idempotent.
  void abort() noexcept;

  /// ok, or why the group was given up.
  [[nodiscard]] Status status() const;

  /// What messages call the ranks, in their order, when the group is a part of a larger one. Before
  /// the first call.
  void call_ranks(std::vector<Rank> names) { names_ = std::move(names); }
  /// A rank as messages call it.
  [[nodiscard]] std::uint32_t called(Rank rank) const {
    return raw(names_.empty() ? rank : names_.at(index(rank)));
  }

  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  [[nodiscard]] std::size_t size() const noexcept { return memory_.size(); }
  [[nodiscard]] const GroupMemory& memory() const noexcept { return memory_; }
  [[nodiscard]] RankWords& own() const noexcept { return memory_.words(index(rank_)); }

  /// Waits until `word`, one of the words of `peer`, is at least `target`. When that fails the
  /// group is aborted: kTimeout or kPeerLost naming `peer`, or what another rank aborted it with.
  Status await(Rank peer, const std::atomic<std::uint64_t>& word, std::uint64_t target,
               std::string_view call, Deadline deadline) {
    if (word.load(std::memory_order_acquire) >= target) [[likely]]
      return {};
    return await_slowly(peer, word, target, call, deadline);
  }

  /// The same wait without consequences: false when `peer` did not get there.
  [[nodiscard]] bool watch(Rank peer, const std::atomic<std::uint64_t>& word, std::uint64_t target,
                           Deadline deadline) const;

  /// Sets one of this rank's words and wakes whoever waits for it.
  void announce(std::atomic<std::uint64_t>& word, std::uint64_t value) noexcept {
    word.store(value, std::memory_order_release);
    notify(own().changed);
  }

  /// "has ended", "has left the group", or nothing while `peer` may still answer.
  [[nodiscard]] std::optional<std::string> why_lost(Rank peer) const;

  /// Aborts the group because of `peer`, unless it is already, and returns the reason that counts.
  Status give_up(StatusCode code, Rank peer, std::string_view what);

  /// Aborts the group because of a rank of the larger one that is none of this group's; messages
  /// call it by its own number. No effect on a group that is aborted already.
  void give_up_for_outsider(StatusCode code, Rank outsider) noexcept;

  /// How long a wait may look before it sleeps; zero when ranks exceed cores.
  [[nodiscard]] nanoseconds spin() const noexcept { return spin_; }

  /// Rounds that the group has behind it; the collectives count on.
  std::uint64_t rounds = 0;
  /// All ranks have released at least this many rounds.
  std::uint64_t released_by_all = 0;
  /// Monitored barriers that this rank has reached.
  std::uint64_t monitored = 0;

 private:
  Group(std::optional<Segment> segment, GroupMemory memory, Rank rank);
  [[gnu::noinline]] Status await_slowly(Rank peer, const std::atomic<std::uint64_t>& word,
                                        std::uint64_t target, std::string_view call,
                                        Deadline deadline);
  bool spin_for(const std::atomic<std::uint64_t>& word, std::uint64_t target) const noexcept;
  [[nodiscard]] std::string describe(Rank peer) const;
  void wake_all() noexcept;

  std::optional<Segment> segment_;
  GroupMemory memory_;
  Rank rank_;
  nanoseconds spin_;
  std::vector<UniqueFd> processes_;  // by rank, from connect() on; empty for a lost one
  std::vector<Rank> names_;          // by rank; empty when they are called by their numbers
};

/// What a rank of a group looks at again at least this often while it sleeps: whether the one it
/// waits for still lives. Everything else wakes it.
inline constexpr milliseconds kLivenessInterval{100};

/// Lets the other hyper-thread go first.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace psplus::collectives
