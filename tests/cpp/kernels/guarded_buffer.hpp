#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

namespace psplus::kernels::testing {

inline constexpr std::byte kPoison{0xA5};

/// `count` values of T between two guard zones, `offset` values after a 64-byte boundary. Starts
/// out poisoned all over, so that an unwritten element and a write outside both show.
template <class T>
class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::size_t count, std::size_t offset = 0)
      : count_(count),
        lines_(2 * kGuardLines + ((count + offset) * sizeof(T) + 63) / 64 + 1),
        begin_(kGuardLines * sizeof(Line) + offset * sizeof(T)) {
    std::memset(lines_.data(), static_cast<int>(kPoison), lines_.size() * sizeof(Line));
  }

  [[nodiscard]] T* data() { return reinterpret_cast<T*>(bytes() + begin_); }
  [[nodiscard]] std::span<T> span() { return {data(), count_}; }
  [[nodiscard]] std::size_t size_bytes() const { return count_ * sizeof(T); }

  /// Whether every byte outside the values still has its poison.
  [[nodiscard]] bool guards_intact() {
    const auto poisoned = [](std::byte b) { return b == kPoison; };
    std::byte* const end = bytes() + lines_.size() * sizeof(Line);
    return std::all_of(bytes(), bytes() + begin_, poisoned) &&
           std::all_of(bytes() + begin_ + size_bytes(), end, poisoned);
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  static constexpr std::size_t kGuardLines = 4;

  std::byte* bytes() { return reinterpret_cast<std::byte*>(lines_.data()); }

  std::size_t count_;
  std::vector<Line> lines_;
  std::size_t begin_;
};

}  // namespace psplus::kernels::testing
