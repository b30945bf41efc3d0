#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/futex.hpp"
#include "base/status.hpp"

namespace psplus::collectives {

/// Tells one group's memory from another's, whoever made them.
using Nonce = std::array<std::uint64_t, 2>;

/// Where a rank stands in its group.
enum class Presence : std::uint32_t { expected = 0, attached = 1, left = 2 };

/// Head of a group's memory.
struct alignas(64) GroupHeader {
  std::uint64_t magic;
  Nonce nonce;
  std::uint32_t size;        ///< ranks
  std::uint32_t slots;       ///< slots of a rank
  std::uint64_t slot_bytes;  ///< payload of a slot
  std::uint64_t ring_bytes;  ///< capacity of the ring between an ordered pair of ranks
  /// 0, or why the group was given up, as Group writes it. Set once.
  alignas(64) std::atomic<std::uint64_t> aborted;
};
static_assert(sizeof(GroupHeader) == 128);

/// What one rank tells the others: rounds counted from the group's beginning, each written by that
/// rank alone, with release. The others load with acquire.
struct alignas(64) RankWords {
  std::atomic<std::uint64_t> published;  ///< rounds whose slot holds this rank's data
  std::atomic<std::uint64_t> reduced;    ///< rounds whose slot holds this rank's reduced part
  std::atomic<std::uint64_t> released;   ///< rounds in which this rank reads no slot any more
  std::atomic<std::uint64_t> monitored;  ///< monitored barriers reached
  std::atomic<std::uint64_t> let_go;     ///< monitored barriers passed; rank 0's counts
  std::atomic<std::int32_t> pid;
  std::atomic<Presence> presence;
  std::atomic<bool> taken;        ///< a process has claimed the rank, for good
  alignas(64) WakeWord changed;   ///< rung after any of the words above changed
  alignas(64) WakeWord messages;  ///< rung after one of this rank's rings was filled or emptied
};
static_assert(sizeof(RankWords) == 192);

/// Positions in a ring between two ranks, in bytes since its beginning.
struct alignas(64) RingWords {
  std::atomic<std::uint64_t> head;              ///< written so far; by the sender, with release
  alignas(64) std::atomic<std::uint64_t> tail;  ///< read so far; by the receiver, with release
};
static_assert(sizeof(RingWords) == 128);

/// Precedes a slot's payload: which call the data belongs to, so that ranks that call different
/// things learn it instead of mixing their data.
struct alignas(64) SlotHeader {
  std::uint64_t call;    ///< collective, element, reduction and root in one word
  std::uint64_t bytes;   ///< size of the call, by the collective's own measure
  double factor;         ///< of premul_sum
  std::uint64_t rounds;  ///< rounds that this rank needs, where ranks may differ
};
static_assert(sizeof(SlotHeader) == 64);

/// A view of a group's shared memory. Pointer-free inside, so every process maps it where it likes.
class GroupMemory {
 public:
  /// Bytes for a group of `size` ranks: slots grow smaller as ranks become more.
  [[nodiscard]] static std::size_t bytes_for(std::size_t size);

  /// Makes a group of `size` ranks out of zeroed memory of at least bytes_for(size) bytes.
  static GroupMemory format(std::span<std::byte> memory, std::size_t size, const Nonce& nonce);

  /// Looks at memory that another rank formatted. kLayoutMismatch when it is not that group's.
  static Result<GroupMemory> open(std::span<std::byte> memory, std::size_t size,
                                  const Nonce& nonce);

  [[nodiscard]] GroupHeader& header() const noexcept;
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t slots() const noexcept { return slots_; }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  [[nodiscard]] std::size_t ring_bytes() const noexcept { return ring_bytes_; }

  [[nodiscard]] RankWords& words(std::size_t rank) const noexcept;
  [[nodiscard]] SlotHeader& slot_header(std::size_t rank, std::size_t slot) const noexcept;
  [[nodiscard]] std::byte* slot(std::size_t rank, std::size_t slot) const noexcept;
  [[nodiscard]] RingWords& ring_words(std::size_t from, std::size_t to) const noexcept;
  [[nodiscard]] std::byte* ring(std::size_t from, std::size_t to) const noexcept;

 private:
  GroupMemory(std::byte* base, std::size_t size, std::size_t slots, std::size_t slot_bytes,
              std::size_t ring_bytes) noexcept;

  std::byte* base_;
  std::size_t size_;
  std::size_t slots_;
  std::size_t slot_bytes_;
  std::size_t ring_bytes_;
};

}  // namespace psplus::collectives
