#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace psplus {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: one time for all processes of a host
using TimePoint = Clock::time_point;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

[[nodiscard]] inline double to_seconds(nanoseconds duration) noexcept {
  return std::chrono::duration<double>(duration).count();
}

/// Nanoseconds of the monotonic clock, comparable between the processes of one host.
[[nodiscard]] inline std::int64_t to_nanoseconds(TimePoint t) noexcept {
  return std::chrono::duration_cast<nanoseconds>(t.time_since_epoch()).count();
}
[[nodiscard]] inline TimePoint from_nanoseconds(std::int64_t ns) noexcept {
  return TimePoint{std::chrono::duration_cast<Clock::duration>(nanoseconds{ns})};
}

/// A point in time until which a call may wait.
class Deadline {
 public:
  explicit Deadline(TimePoint at) noexcept : at_(at) {}
  /// `duration` from now; absurdly long durations saturate instead of overflowing.
  [[nodiscard]] static Deadline after(nanoseconds duration) noexcept {
    const auto now = Clock::now();
    return Deadline{duration >= TimePoint::max() - now ? TimePoint::max() : now + duration};
  }

  [[nodiscard]] TimePoint at() const noexcept { return at_; }
  [[nodiscard]] bool passed() const noexcept { return Clock::now() >= at_; }
  /// Time left, never negative.
  [[nodiscard]] nanoseconds left() const noexcept {
    return std::max(nanoseconds{0}, std::chrono::duration_cast<nanoseconds>(at_ - Clock::now()));
  }
  [[nodiscard]] Deadline at_most(nanoseconds duration) const noexcept {
    return Deadline{std::min(at_, after(duration).at_)};
  }

 private:
  TimePoint at_;
};

}  // namespace psplus
