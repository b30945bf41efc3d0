#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "c10d/work.hpp"

namespace psplus::pg {

/// Waits until no thread of any group runs a callback, or `deadline`. Before the interpreter ends:
/// it would end threads that want the GIL later by unwinding them, out of torch's destructors too.
void await_callbacks(Deadline deadline);

/// Runs a group's collectives one at a time, in the order submitted: on a thread of its own, which
/// exists from the first asynchronous one on, or on the caller's when the caller waits anyway and
/// nothing is queued.
///
/// Callbacks of futures run on the same thread after their collective, and may submit and wait as
/// they like: while one runs, another thread, made when it is needed, serves the queue.
///
/// Thread safety: all methods from any thread.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  ~Executor();

  /// Queues `work`, or runs it before returning. After shutdown it completes with kClosed.
  void submit(const c10::intrusive_ptr<GroupWork>& work, bool caller_waits);

  /// Runs the callbacks of a work that was finished on a thread where they must not run.
  void settle(const c10::intrusive_ptr<GroupWork>& work);

  /// Waits until nothing is queued or running. @return whether that came before `deadline`.
  bool drain(Deadline deadline);

  /// Completes what is still queued with kClosed, waits for what is running, ends the threads. One
  /// that sits in a callback beyond `deadline` ends when the callback does.
  void shutdown(Deadline deadline) noexcept;

 private:
  using WorkPtr = c10::intrusive_ptr<GroupWork>;

  void serve();
  void run_next(std::unique_lock<std::mutex>& lock);
  void attend();
  [[nodiscard]] bool add_thread();
  [[nodiscard]] std::size_t own_threads() const;

  std::mutex mutex_;               // guards all below; neither works nor callbacks run under it
  std::condition_variable to_do_;  // threads wait for something to do
  std::condition_variable done_;   // drain() and shutdown() wait for the end of something
  std::deque<WorkPtr> queue_;
  std::deque<WorkPtr> unsettled_;
  bool running_ = false;  ///< a work runs, on whatever thread
  bool stop_ = false;
  std::vector<std::thread> threads_;
  std::size_t alive_ = 0;     ///< threads that have not ended
  std::size_t idle_ = 0;      ///< of these, threads that have nothing to do
  std::size_t settling_ = 0;  ///< and threads in callbacks, which may take long
};

}  // namespace psplus::pg
