#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "base/ids.hpp"

/// Bit layouts of the 64-bit words that processes exchange.
namespace psplus::store {

using Word = std::atomic<std::uint64_t>;
using HalfWord = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && HalfWord::is_always_lock_free,
              "shared words must not need a lock");

/// Entry of a chunk table: which batch made the chunk, and in which unit it lies.
struct ChunkEntry {
  BatchId batch;
  UnitIndex unit;

  static constexpr int kUnitBits = 24;
  static constexpr std::uint64_t kMaxUnits = std::uint64_t{1} << kUnitBits;
  static constexpr std::uint64_t kMaxBatches = std::uint64_t{1} << (64 - kUnitBits);

  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return raw(batch) << kUnitBits | raw(unit);
  }
  [[nodiscard]] static constexpr ChunkEntry unpack(std::uint64_t word) noexcept {
    return {BatchId{word >> kUnitBits},
            UnitIndex{static_cast<std::uint32_t>(word & (kMaxUnits - 1))}};
  }
};

/// The word by which a push exists (`published`) and by which it is never applied twice (`dedup`):
/// incarnation and sequence. In `published` the server sets the top bit to close it for good.
struct PushMark {
  Incarnation incarnation;
  Sequence sequence;

  static constexpr std::uint64_t kClosed = std::uint64_t{1} << 63;
  static constexpr int kSequenceBits = 47;

  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return static_cast<std::uint64_t>(raw(incarnation)) << kSequenceBits | raw(sequence);
  }
  [[nodiscard]] static constexpr PushMark unpack(std::uint64_t word) noexcept {
    word &= ~kClosed;
    return {Incarnation{static_cast<std::uint16_t>(word >> kSequenceBits)},
            Sequence{word & ((std::uint64_t{1} << kSequenceBits) - 1)}};
  }
};

/// State word of the batch record: the id of the batch and whether it is open.
struct RecordState {
  BatchId batch;
  bool open;

  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return raw(batch) << 1 | (open ? 1u : 0u);
  }
  [[nodiscard]] static constexpr RecordState unpack(std::uint64_t word) noexcept {
    return {BatchId{word >> 1}, (word & 1) != 0};
  }
};

/// Doubles travel in words by their bits.
[[nodiscard]] inline std::uint64_t to_word(double value) noexcept {
  return std::bit_cast<std::uint64_t>(value);
}
[[nodiscard]] inline double from_word(std::uint64_t word) noexcept {
  return std::bit_cast<double>(word);
}

}  // namespace psplus::store
