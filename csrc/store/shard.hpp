#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "store/layout.hpp"
#include "store/limits.hpp"
#include "store/rule.hpp"
#include "store/segment_header.hpp"
#include "store/words.hpp"

/// Shard segments: a chunk table over a pool of units, changed by copy-on-write.
///
/// A unit is a chunk of values. Where the servers step, a chunk of each plane of state follows it,
/// in the same addressing, and then the steps taken, one word for each parameter of the chunk in
/// the order of ExtentLayout::params_of_chunk(): one table entry flips all of it.
///
/// Invariant: the unit that a table entry names holds, complete and unchanging, the chunk as the
/// batch in that entry left it. The server writes only units that no entry names. A reader that
/// finds the same entry before and after its copy has therefore copied one batch's chunk: had the
/// unit been reused, the entry would have changed first (order P1, P2 below).
namespace psplus::store {

/// Spare units of a shard: one for each thread that applies. Two threads must never share one.
inline constexpr std::uint32_t kSpareUnits = 1;

struct ShardHeader {
  SegmentHeader header;
  std::uint64_t layout_offset;
  std::uint64_t layout_bytes;
  std::uint64_t table_offset;
  std::uint64_t pool_offset;
  std::uint64_t unit_bytes;  ///< value chunk, state chunks, counts
  std::uint32_t chunk_count;
  std::uint32_t unit_count;
  std::uint32_t rule_kind;  ///< RuleKind
  std::uint32_t planes;
  std::uint64_t count_bytes;  ///< of the step counts in a unit; 0 without state
};
static_assert(sizeof(ShardHeader) == 128);

/// A mapped shard, for readers.
class ShardView {
 public:
  ShardView() = default;
  explicit ShardView(std::span<std::byte> bytes) noexcept : bytes_(bytes) {}

  [[nodiscard]] static std::size_t segment_bytes(const ExtentLayout& layout,
                                                 Rule rule = {}) noexcept;
  /// Writes header, layout and the first table into a zeroed segment: chunk c lies in unit c, batch
  /// 0.
  static void format(std::span<std::byte> bytes, const ExtentLayout& layout, Rule rule = {});
  /// Checks every offset against the segment's size and every entry against the pool.
  [[nodiscard]] Status check() const;
  /// Whether the shard, which has passed check(), is one of `layout`.
  [[nodiscard]] bool fits(const ExtentLayout& layout) const noexcept;

  [[nodiscard]] explicit operator bool() const noexcept { return !bytes_.empty(); }
  [[nodiscard]] const ShardHeader& header() const noexcept {
    return *reinterpret_cast<const ShardHeader*>(bytes_.data());
  }
  [[nodiscard]] std::span<const std::byte> layout_bytes() const noexcept {
    return bytes_.subspan(header().layout_offset, header().layout_bytes);
  }
  [[nodiscard]] Word& entry(ChunkIndex chunk) const noexcept {
    return reinterpret_cast<Word*>(bytes_.data() + header().table_offset)[index(chunk)];
  }
  [[nodiscard]] std::byte* unit(UnitIndex unit) const noexcept {
    return bytes_.data() + header().pool_offset + index(unit) * header().unit_bytes;
  }
  [[nodiscard]] Rule rule() const noexcept {
    return {static_cast<RuleKind>(header().rule_kind), static_cast<std::uint8_t>(header().planes)};
  }
  /// Bytes from a unit's values to its first plane of state, and from plane to plane.
  [[nodiscard]] std::size_t chunk_bytes() const noexcept {
    return (header().unit_bytes - header().count_bytes) / (1 + header().planes);
  }
  /// Bytes from the beginning of a unit to its step counts.
  [[nodiscard]] std::size_t counts_offset() const noexcept {
    return header().unit_bytes - header().count_bytes;
  }

  /// Copies `chunk`, which the server may be updating, into `out` (unit_bytes at most; a multiple
  /// of 8 bytes). Never waits for the server: it repeats when the entry moved meanwhile.
  /// @return the batch that made what was copied; kBusy when it moved on each of `max_tries`.
  /// `retries`, if given, is raised by the number of repetitions.
  [[nodiscard]] Result<BatchId> read_chunk(ChunkIndex chunk, std::span<std::byte> out,
                                           std::uint64_t* retries = nullptr,
                                           int max_tries = kMaxTries) const;

  /// The same without a copy: calls `use(unit, again)` with the memory of `chunk`, which the server
  /// may be updating, until it stood still during a call; `again` says that an earlier call was in
  /// vain. What a call in vain has read is any mixture of batches.
  template <class Use>
  [[nodiscard]] Result<BatchId> read_in_place(ChunkIndex chunk, std::uint64_t& retries,
                                              Use use) const {
    const Word& word = entry(chunk);
    for (int attempt = 0; attempt < kMaxTries; ++attempt) {
      const std::uint64_t before = word.load(std::memory_order_acquire);  // pairs with P1
      const auto now = ChunkEntry::unpack(before);
      use(unit(now.unit), attempt > 0);
      std::atomic_thread_fence(std::memory_order_acquire);  // pairs with P2
      if (word.load(std::memory_order_relaxed) == before) return now.batch;
      ++retries;
    }
    return busy(chunk, kMaxTries);
  }

 private:
  static constexpr int kMaxTries = 1000;
  static Status busy(ChunkIndex chunk, int tries);
  std::span<std::byte> bytes_;
};

/// The free units of a shard, known to its only writer: pool minus table, never stored.
class FreeUnits {
 public:
  FreeUnits() = default;
  /// Derives them from the table. kInternal when the table names a unit twice.
  static Result<FreeUnits> derive(const ShardView& shard);

  /// The unit that apply thread `thread` writes next.
  [[nodiscard]] UnitIndex spare(std::size_t thread) const noexcept { return units_[thread]; }
  /// The chunk moved to the spare unit; the unit it left becomes the spare.
  void exchange(std::size_t thread, UnitIndex replaced) noexcept { units_[thread] = replaced; }

 private:
  std::vector<UnitIndex> units_;
};

}  // namespace psplus::store
