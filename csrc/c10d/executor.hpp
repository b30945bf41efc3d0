#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/clock.hpp"
#include "c10d/work.hpp"

namespace psplus::pg {

/// Runs a group's collectives one at a time, in the order submitted: on a thread of its own, which
/// exists from the first asynchronous one on, or on the caller's when the caller waits anyway and
/// nothing is queued.
///
/// Thread safety: all methods from any thread; `shutdown` once at a time.
class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  ~Executor() { shutdown(); }

  /// Queues `work`, or runs it before returning. After shutdown it completes with kClosed.
  void submit(const c10::intrusive_ptr<GroupWork>& work, bool caller_waits);

  /// Waits until nothing is queued or running. @return whether that came before `deadline`.
  bool drain(Deadline deadline);

  /// Completes what is still queued with kClosed, waits for what is running, ends the thread.
  void shutdown() noexcept;

  /// In a forked child the thread does not exist and must not be waited for.
  void forget() noexcept;

 private:
  void run();
  [[nodiscard]] c10::intrusive_ptr<GroupWork> take(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;  // guards all below; no work runs under it
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<GroupWork>> queue_;
  bool running_ = false;  ///< a work runs, on whatever thread
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace psplus::pg
