#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "collectives/group.hpp"
#include "collectives/reduction.hpp"

namespace psplus::collectives {

/// The collectives that move data through slots.
enum class Collective : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  barrier,
};

[[nodiscard]] std::string_view name(Collective collective);

/// What ranks must agree about when they meet in a collective.
struct Call {
  Collective collective{};
  Rank root{};
  Element element{};
  Reduction reduction{};
  std::uint64_t bytes = 0;   ///< 0 where ranks may differ
  double factor = 1;         ///< ranks may differ
  std::uint64_t rounds = 0;  ///< ranks may differ
};

/// One collective's way through the group's rounds. In a round each rank may fill its slot and read
/// the others'; all ranks count the same rounds, whatever they do in them, so a slot is free again
/// when everybody has released the round that used it last.
///
/// Rounds are counted from 0 within the passage. A failed call has aborted the group; the caller
/// just returns the status.
class Passage {
 public:
  Passage(Group& group, const Call& call, Deadline deadline) noexcept
      : group_(group), call_(call), deadline_(deadline), base_(group.rounds) {}

  /// Waits until this rank's slot of `round` may be filled.
  Status claim(std::uint64_t round);
  /// Tells the others that this rank's slot of `round` is filled.
  void publish(std::uint64_t round) noexcept;
  /// Waits until `peer` has published `round`; in the first one checks that it makes the same call.
  Status await(Rank peer, std::uint64_t round);
  Status await_all(std::uint64_t round);
  /// Tells the others that this rank's part of its slot holds the reduced elements.
  void publish_reduced(std::uint64_t round) noexcept;
  Status await_all_reduced(std::uint64_t round);
  /// This rank reads no slot of `round` any more.
  void release(std::uint64_t round) noexcept;
  /// Ends the passage after `rounds` rounds, the same number on all ranks.
  void finish(std::uint64_t rounds) noexcept;

  [[nodiscard]] std::byte* own(std::uint64_t round) const noexcept {
    return slot(group_.rank(), round);
  }
  [[nodiscard]] std::byte* slot(Rank rank, std::uint64_t round) const noexcept {
    return group_.memory().slot(index(rank), slot_index(round));
  }
  /// Header of `rank`'s slot in the first round; read after await().
  [[nodiscard]] const SlotHeader& header(Rank rank) const noexcept {
    return group_.memory().slot_header(index(rank), slot_index(0));
  }
  /// The ranks but this one, the next one first, so that not all queue up at one.
  [[nodiscard]] Rank peer(std::size_t i) const noexcept {
    return static_cast<Rank>((index(group_.rank()) + 1 + i) % group_.size());
  }
  [[nodiscard]] std::size_t peers() const noexcept { return group_.size() - 1; }

 private:
  [[nodiscard]] std::size_t slot_index(std::uint64_t round) const noexcept {
    return (base_ + round) % group_.memory().slots();
  }
  Status check_call(Rank peer);

  Group& group_;
  const Call& call_;
  Deadline deadline_;
  std::uint64_t base_;
};

}  // namespace psplus::collectives
