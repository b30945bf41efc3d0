#include "c10d/executor.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include <pthread.h>

#include "base/counted.hpp"

namespace psplus::pg {
namespace {

/// Threads of all groups that run callbacks. Never destroyed: they may outlast static objects.
struct CallbackThreads {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t count = 0;
};

CallbackThreads& callback_threads() {
  static auto* const threads = new CallbackThreads;
  return *threads;
}

}  // namespace

void await_callbacks(Deadline deadline) {
  CallbackThreads& threads = callback_threads();
  std::unique_lock lock{threads.mutex};
  (void)threads.changed.wait_until(lock, deadline.at(), [&] { return threads.count == 0; });
}

// The interpreter's end may unwind a callback and all that called it, so what must be undone is
// undone by destructors, and no function below is noexcept.

Executor::~Executor() {
  // Whoever is left here sat in a callback when the group was shut down; one of them may run this.
  for (std::thread& thread : threads_) thread.detach();
}

void Executor::submit(const WorkPtr& work, bool caller_waits) {
  std::unique_lock lock{mutex_};
  if (stop_) {
    lock.unlock();
    work->complete(to_exception(shut_down()));
    return;
  }
  if (caller_waits && queue_.empty() && !running_) {
    running_ = true;
    lock.unlock();
    work->run();
    work->settle();  // nobody but the caller knows the work: there are no callbacks
    lock.lock();
    running_ = false;
    done_.notify_all();
  } else {
    queue_.push_back(work);
  }
  attend();
  if (queue_.empty() || running_ || alive_ != 0) return;
  const auto unserved = std::exchange(queue_, {});
  lock.unlock();
  for (const WorkPtr& lost : unserved)
    lost->complete(to_exception({StatusCode::kInternal, "a process group cannot start a thread"}));
}

void Executor::settle(const WorkPtr& work) {
  if (!work->has_future()) return;
  std::unique_lock lock{mutex_};
  if (!stop_) {
    unsettled_.push_back(work);
    attend();
    if (alive_ != 0) return;
    unsettled_.pop_back();
  }
  lock.unlock();
  work->settle();
}

/// Sees to it that a thread comes for what waits. One that runs a work comes by itself afterwards.
void Executor::attend() {
  const bool can_run = !queue_.empty() && !running_;
  if (stop_ || (!can_run && unsettled_.empty())) return;
  if (idle_ > 0)
    to_do_.notify_one();
  else if (!unsettled_.empty() || alive_ == settling_)
    // Without another thread things go on once a callback has returned, if it waits for none.
    (void)add_thread();
}

bool Executor::add_thread() {
  try {
    threads_.emplace_back([self = shared_from_this()] { self->serve(); });
  } catch (const std::system_error&) {
    return false;
  }
  // Counted before it runs, so that nobody makes another one meanwhile.
  ++alive_;
  ++idle_;
  return true;
}

void Executor::serve() {
  ::pthread_setname_np(::pthread_self(), "psplus-group");
  std::unique_lock lock{mutex_};
  const Counted alive{alive_, done_, lock};
  --alive_;  // by add_thread()
  for (;;) {
    to_do_.wait(lock,
                [&] { return stop_ || !unsettled_.empty() || (!queue_.empty() && !running_); });
    --idle_;
    if (stop_) break;
    run_next(lock);
    ++idle_;
    done_.notify_all();
  }
}

void Executor::run_next(std::unique_lock<std::mutex>& lock) {
  auto& from = unsettled_.empty() ? queue_ : unsettled_;
  WorkPtr work = std::move(from.front());
  from.pop_front();
  if (&from == &queue_) {
    running_ = true;
    lock.unlock();
    work->run();  // never throws
    lock.lock();
    running_ = false;
  }
  if (work->has_future()) {
    CallbackThreads& all = callback_threads();
    std::unique_lock all_lock{all.mutex};
    const Counted anywhere{all.count, all.changed, all_lock};
    all_lock.unlock();
    const Counted settling{settling_, done_, lock};
    attend();
    lock.unlock();
    work->settle();
    work.reset();  // may free the caller's tensors and callbacks
    return;
  }
  lock.unlock();
  work.reset();  // may free the caller's tensors
  lock.lock();
}

std::size_t Executor::own_threads() const {
  return static_cast<std::size_t>(std::count_if(
      threads_.begin(), threads_.end(),
      [](const std::thread& thread) { return thread.get_id() == std::this_thread::get_id(); }));
}

bool Executor::drain(Deadline deadline) {
  std::unique_lock lock{mutex_};
  const std::size_t own = own_threads();  // called by a callback
  return done_.wait_until(lock, deadline.at(), [&] {
    return stop_ || (queue_.empty() && unsettled_.empty() && !running_ && settling_ == own);
  });
}

void Executor::shutdown(Deadline deadline) noexcept {
  std::unique_lock lock{mutex_};
  stop_ = true;
  const auto unfinished = std::exchange(queue_, {});
  const auto unsettled = std::exchange(unsettled_, {});
  to_do_.notify_all();
  done_.notify_all();
  lock.unlock();
  for (const WorkPtr& work : unfinished) work->complete(to_exception(shut_down()));
  for (const WorkPtr& work : unsettled) work->settle();
  lock.lock();
  const std::size_t own = own_threads();
  const bool ended =
      done_.wait_until(lock, deadline.at(), [&] { return !running_ && alive_ == own; });
  if (!ended) return;
  std::vector<std::thread> threads = std::exchange(threads_, {});
  lock.unlock();
  for (std::thread& thread : threads)
    if (thread.get_id() == std::this_thread::get_id())
      thread.detach();  // it ends when the callback that called us does
    else
      thread.join();
}

}  // namespace psplus::pg
