#pragma once

// How the collectives cut buffers into what fits a slot.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "base/format.hpp"
#include "base/ids.hpp"
#include "collectives/group.hpp"

namespace psplus::collectives {

inline constexpr std::size_t kCacheLine = 64;

[[nodiscard]] constexpr std::size_t align_up(std::size_t bytes) noexcept {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

/// Bytes for each destination when a slot is divided among all ranks.
[[nodiscard]] inline std::size_t piece_bytes(const Group& group) noexcept {
  return group.memory().slot_bytes() / group.size() / kCacheLine * kCacheLine;
}

/// Rounds that `bytes` need, at least one: even an empty call meets the other ranks.
[[nodiscard]] constexpr std::uint64_t rounds_for(std::size_t bytes, std::size_t piece) noexcept {
  return std::max<std::uint64_t>(1, (bytes + piece - 1) / piece);
}

/// Bytes of a buffer that travel in `round`.
[[nodiscard]] constexpr std::size_t bytes_in_piece(std::size_t bytes, std::uint64_t round,
                                                   std::size_t piece) noexcept {
  const std::size_t begin = round * piece;
  return begin >= bytes ? 0 : std::min(piece, bytes - begin);
}

/// Copies the piece of `round` of a buffer into a slot.
inline void copy_piece(std::byte* slot, const void* buffer, std::size_t bytes, std::uint64_t round,
                       std::size_t piece) noexcept {
  if (const std::size_t n = bytes_in_piece(bytes, round, piece); n != 0)
    std::memcpy(slot, static_cast<const std::byte*>(buffer) + round * piece, n);
}

/// Copies a piece from a slot to its place in a buffer.
inline void place_piece(void* buffer, const std::byte* slot, std::size_t bytes, std::uint64_t round,
                        std::size_t piece) noexcept {
  if (const std::size_t n = bytes_in_piece(bytes, round, piece); n != 0)
    std::memcpy(static_cast<std::byte*>(buffer) + round * piece, slot, n);
}

/// Copies a rank's own contribution, which passes through no slot.
inline void copy_own(void* out, const void* in, std::size_t bytes) noexcept {
  if (bytes != 0 && out != in) std::memmove(out, in, bytes);
}

inline void check_rank(const Group& group, Rank root) {
  if (index(root) >= group.size())
    throw std::invalid_argument(
        formatted("root {} is not a rank of a group of {}", raw(root), group.size()));
}

inline void check_length(const Group& group, std::size_t length, std::string_view what) {
  if (length != group.size())
    throw std::invalid_argument(
        formatted("{} {} given to a group of {} ranks", length, what, group.size()));
}

}  // namespace psplus::collectives
