#pragma once

#include <cstdint>

#include "base/clock.hpp"

namespace psplus::sim {

/// Random numbers that are the same for a seed on every machine and library (splitmix64 by Steele,
/// Lea and Flood 2014, OOPSLA). The standard distributions do not promise that.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  [[nodiscard]] std::uint64_t next() noexcept {
    state_ += 0x9e37'79b9'7f4a'7c15;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9;
    z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11eb;
    return z ^ (z >> 31);
  }
  /// 0 .. count - 1; `count` is small against 2^64, so the bias is too.
  [[nodiscard]] std::uint64_t below(std::uint64_t count) noexcept { return next() % count; }
  /// `least` .. `most`, both included.
  [[nodiscard]] std::uint64_t between(std::uint64_t least, std::uint64_t most) noexcept {
    return least + below(most - least + 1);
  }
  [[nodiscard]] bool chance(double probability) noexcept {
    return static_cast<double>(next() >> 11) * 0x1p-53 < probability;
  }
  [[nodiscard]] nanoseconds duration(nanoseconds least, nanoseconds most) noexcept {
    return nanoseconds{static_cast<std::int64_t>(between(
        static_cast<std::uint64_t>(least.count()), static_cast<std::uint64_t>(most.count())))};
  }
  /// A generator of its own, so that what one actor draws does not shift what another draws.
  [[nodiscard]] Random fork() noexcept { return Random{next()}; }

 private:
  std::uint64_t state_;
};

}  // namespace psplus::sim
