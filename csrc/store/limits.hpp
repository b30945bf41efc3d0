#pragma once

#include <cstddef>

namespace psplus::store {

inline constexpr std::size_t kMaxMembers = 256;       ///< workers a server
inline constexpr std::size_t kMaxStreams = 64;        ///< `wrap`s and dense values a job
inline constexpr std::size_t kMaxExtents = 256;       ///< extents a server
inline constexpr std::size_t kMaxStreamExtents = 64;  ///< extents a stream: bits of a mask
inline constexpr std::size_t kSlots = 2;              ///< push slots a worker and stream
inline constexpr std::size_t kMaxBatchPushes = kMaxMembers * kSlots;
inline constexpr std::size_t kChunkBytes = 64 * 1024;  ///< values of a chunk; tests use less
inline constexpr std::size_t kPageBytes = 4096;

[[nodiscard]] constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace psplus::store
