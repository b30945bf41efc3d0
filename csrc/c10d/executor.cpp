#include "c10d/executor.hpp"

#include <pthread.h>

namespace psplus::pg {
namespace {

Status closed() { return {StatusCode::kClosed, "the process group was shut down"}; }

}  // namespace

void Executor::submit(const c10::intrusive_ptr<GroupWork>& work, bool caller_waits) {
  std::unique_lock lock{mutex_};
  if (stop_) {
    lock.unlock();
    work->complete(to_exception(closed()));
    return;
  }
  const bool own_thread = thread_.get_id() == std::this_thread::get_id();
  if (caller_waits && queue_.empty() && !running_) {
    running_ = true;
    lock.unlock();
    work->run();
    lock.lock();
    running_ = false;
    if (!queue_.empty() || stop_) changed_.notify_all();
    return;
  }
  queue_.push_back(work);
  if (own_thread) {
    // A callback of an earlier work submits from here, perhaps to wait: nobody else could run it.
    while (caller_waits && !queue_.empty()) {
      const auto next = take(lock);
      lock.unlock();
      next->run();
      lock.lock();
      running_ = false;
    }
    return;
  }
  if (!thread_.joinable()) thread_ = std::thread{[this] { run(); }};
  changed_.notify_all();
}

c10::intrusive_ptr<GroupWork> Executor::take(std::unique_lock<std::mutex>&) {
  auto work = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  return work;
}

void Executor::run() {
  ::pthread_setname_np(::pthread_self(), "psplus-group");
  std::unique_lock lock{mutex_};
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || (!queue_.empty() && !running_); });
    if (stop_) return;
    auto work = take(lock);
    lock.unlock();
    work->run();  // never throws
    work.reset();
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

bool Executor::drain(Deadline deadline) {
  std::unique_lock lock{mutex_};
  return changed_.wait_until(lock, deadline.at(),
                             [&] { return stop_ || (queue_.empty() && !running_); });
}

void Executor::shutdown() noexcept {
  std::deque<c10::intrusive_ptr<GroupWork>> left;
  {
    std::unique_lock lock{mutex_};
    stop_ = true;
    left.swap(queue_);
    changed_.notify_all();
  }
  for (const auto& work : left) work->complete(to_exception(closed()));
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();  // the last reference to the group went in a callback of ours
  else
    thread_.join();
}

void Executor::forget() noexcept {
  if (thread_.joinable()) thread_.detach();
}

}  // namespace psplus::pg
