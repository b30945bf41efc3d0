#pragma once

#include <coroutine>
#include <cstdint>
#include <exception>

#include "runtime/sim/scheduler.hpp"
#include "runtime/sim/task.hpp"

namespace psplus::sim {

/// Somebody who acts by himself in virtual time: one coroutine that sleeps or is parked whenever
/// another actor may run. Outlives its coroutine, because the scheduler may still hold a wake-up.
class Actor {
 public:
  explicit Actor(Scheduler& scheduler) noexcept : scheduler_(scheduler) {}
  Actor(const Actor&) = delete;
  Actor& operator=(const Actor&) = delete;
  virtual ~Actor() = default;

  /// Begins to run `task` after `delay`.
  void start(Task task, nanoseconds delay);
  /// Ends the coroutine where it stands. Not to be called by the coroutine itself: that throws.
  void stop() noexcept;
  [[nodiscard]] bool running() const noexcept { return static_cast<bool>(task_); }
  /// Wakes the coroutine if it is parked; it looks at its condition again.
  void notify();
  /// Until `time` the actor does nothing, as a stopped process does.
  void freeze_until(TimePoint time) noexcept { frozen_until_ = time; }
  [[nodiscard]] bool frozen() const noexcept { return scheduler_.now() < frozen_until_; }
  [[nodiscard]] TimePoint frozen_until() const noexcept { return frozen_until_; }

 protected:
  /// The coroutine has ended, by `error` if that is not null.
  virtual void finished(std::exception_ptr error) = 0;

  class Suspension {
   public:
    Suspension(Actor& actor, nanoseconds delay, bool parks) noexcept
        : actor_(actor), delay_(delay), parks_(parks) {}
    [[nodiscard]] bool await_ready() const noexcept { return false; }
    void await_suspend(std::coroutine_handle<> handle) { actor_.suspend(handle, delay_, parks_); }
    void await_resume() const noexcept {}

   private:
    Actor& actor_;
    nanoseconds delay_;
    bool parks_;
  };
  [[nodiscard]] Suspension sleep(nanoseconds delay) noexcept { return {*this, delay, false}; }
  /// Until somebody calls `notify`.
  [[nodiscard]] Suspension parked() noexcept { return {*this, nanoseconds{0}, true}; }

  Scheduler& scheduler_;

 private:
  void suspend(std::coroutine_handle<> handle, nanoseconds delay, bool parks);
  void schedule_resumption(nanoseconds delay);
  void resume(std::uint64_t ticket);

  Task task_;
  std::coroutine_handle<> resume_point_;
  std::uint64_t ticket_ = 0;  ///< tells the current suspension's wake-up from older ones
  bool parked_ = false;
  TimePoint frozen_until_{};
};

}  // namespace psplus::sim
