#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/clock.hpp"

namespace psplus::sim {

/// Virtual time: a queue of actions, run in order of time, and of arrival within one instant.
/// Single-threaded. `advance_to` may be called from within an action.
class Scheduler {
 public:
  using Action = std::function<void()>;

  [[nodiscard]] TimePoint now() const noexcept { return now_; }
  void after(nanoseconds delay, Action action) { at(now_ + delay, std::move(action)); }
  void at(TimePoint time, Action action);

  /// Moves to the earliest action and runs it. @return false when there is none.
  bool run_next();
  /// Runs all that is due until `time`, then stands at `time`: somebody else's work takes that
  /// long.
  void advance_to(TimePoint time);
  [[nodiscard]] std::uint64_t actions_run() const noexcept { return actions_run_; }

 private:
  struct Entry {
    TimePoint time;
    std::uint64_t order;
    Action action;
  };
  static bool later(const Entry& a, const Entry& b) noexcept {
    return a.time != b.time ? a.time > b.time : a.order > b.order;
  }

  TimePoint now_{std::chrono::seconds{1}};  // a monotonic clock that reads 0 would look unset
  std::uint64_t next_order_ = 0;
  std::uint64_t actions_run_ = 0;
  std::vector<Entry> heap_;  ///< earliest first, by std::push_heap
};

}  // namespace psplus::sim
