#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace psplus {

/// Place of a worker in its server's member table, 0..255. A restarted rank gets its old place
/// under a new incarnation.
enum class MemberId : std::uint16_t {};
/// Rank of a worker in the job; a label, never an index into shared state.
enum class Rank : std::uint32_t {};
/// One life of a worker process in its member place.
enum class Incarnation : std::uint16_t {};
/// One `wrap` or dense value: its own queue, gates and step vector.
enum class StreamId : std::uint16_t {};
/// An append-only part of the layout: one shard segment of a server.
enum class ExtentId : std::uint16_t {};
/// Place of an extent in its stream: 0 is there from the start, n is the n-th that was added.
enum class StreamExtent : std::uint16_t {};
/// Index of a copy-on-write chunk within an extent.
enum class ChunkIndex : std::uint32_t {};
/// Index of a physical unit of a shard's pool; 24 bits in a chunk entry.
enum class UnitIndex : std::uint32_t {};
/// A batch of a server, counted from 1; 40 bits in a chunk entry. 0 is "initial contents".
enum class BatchId : std::uint64_t {};
/// Pushes published by one incarnation on one stream, counted from 1; 47 bits.
enum class Sequence : std::uint64_t {};
/// Value of a gate counter: steps of a worker on a stream.
enum class Step : std::uint64_t {};
/// Number of a segment within a job; never used twice.
enum class SegmentId : std::uint32_t {};
/// One life of a server: raised by each take-over.
enum class Epoch : std::uint32_t {};

/// The number behind a strong id.
template <class Id>
requires std::is_enum_v<Id>
[[nodiscard]] constexpr auto raw(Id id) noexcept {
  return static_cast<std::underlying_type_t<Id>>(id);
}

/// `raw(id)` widened for indexing.
template <class Id>
requires std::is_enum_v<Id>
[[nodiscard]] constexpr std::size_t index(Id id) noexcept { return static_cast<std::size_t>(id); }

template <class Id>
requires std::is_enum_v<Id>
[[nodiscard]] constexpr Id next(Id id) noexcept {
  return Id{static_cast<std::underlying_type_t<Id>>(raw(id) + 1)};
}

}  // namespace psplus
