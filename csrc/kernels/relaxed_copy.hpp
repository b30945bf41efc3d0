#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace psplus::kernels {

namespace detail {

// May alias: the memory holds floats, and the compiler must not reorder around that.
using SharedWord [[gnu::may_alias]] = std::uint64_t;
using SharedHalfWord [[gnu::may_alias]] = std::uint32_t;

inline void read_word(const SharedWord* src, std::byte* out) noexcept {
  const std::uint64_t word = __atomic_load_n(src, __ATOMIC_RELAXED);
  std::memcpy(out, &word, sizeof(word));
}

inline void write_word(const std::byte* in, SharedWord* dst) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, in, sizeof(word));
  __atomic_store_n(dst, word, __ATOMIC_RELAXED);
}

}  // namespace detail

/// Copies `bytes` from memory that another thread or process may be writing. Each aligned 8-byte
/// word is read whole by one relaxed atomic load; different words may come from different writes.
/// Nothing is ordered: to learn whether what was read belongs together, the caller loads the word
/// that publishes the memory with acquire before, issues an acquire fence after, and checks the
/// word again.
///
/// `shared_src` is 8-byte aligned, `bytes` a multiple of 4 (a last half word is read by itself);
/// `dst` has any alignment, belongs to the caller alone and does not overlap the source.
inline void copy_words_relaxed(const void* shared_src, void* dst, std::size_t bytes) noexcept {
  const auto* src = static_cast<const detail::SharedWord*>(shared_src);
  auto* out = static_cast<std::byte*>(dst);
  std::size_t words = bytes / sizeof(std::uint64_t);
  // Unrolled by hand, word by word: g++ sends a block of words through the stack.
  for (; words >= 4; words -= 4, src += 4, out += 32) {
    detail::read_word(src, out);
    detail::read_word(src + 1, out + 8);
    detail::read_word(src + 2, out + 16);
    detail::read_word(src + 3, out + 24);
  }
  for (; words > 0; --words, ++src, out += 8) detail::read_word(src, out);
  if (bytes % sizeof(std::uint64_t) != 0) {
    const auto* last = reinterpret_cast<const detail::SharedHalfWord*>(src);
    const std::uint32_t half = __atomic_load_n(last, __ATOMIC_RELAXED);
    std::memcpy(out, &half, sizeof(half));
  }
}

/// The twin for writing: stores `bytes` into memory that others may be reading, each aligned 8-byte
/// word by one relaxed atomic store. Nothing is ordered: the caller publishes with a release store
/// afterwards, and issues a release fence before it overwrites what was published earlier.
///
/// `shared_dst` is 8-byte aligned, `bytes` a multiple of 4; `src` has any alignment, is written by
/// nobody meanwhile and does not overlap the destination.
inline void store_words_relaxed(const void* src, void* shared_dst, std::size_t bytes) noexcept {
  const auto* in = static_cast<const std::byte*>(src);
  auto* dst = static_cast<detail::SharedWord*>(shared_dst);
  std::size_t words = bytes / sizeof(std::uint64_t);
  for (; words >= 4; words -= 4, in += 32, dst += 4) {
    detail::write_word(in, dst);
    detail::write_word(in + 8, dst + 1);
    detail::write_word(in + 16, dst + 2);
    detail::write_word(in + 24, dst + 3);
  }
  for (; words > 0; --words, in += 8, ++dst) detail::write_word(in, dst);
  if (bytes % sizeof(std::uint64_t) != 0) {
    std::uint32_t half = 0;
    std::memcpy(&half, in, sizeof(half));
    __atomic_store_n(reinterpret_cast<detail::SharedHalfWord*>(dst), half, __ATOMIC_RELAXED);
  }
}

}  // namespace psplus::kernels
