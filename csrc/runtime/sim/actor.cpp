#include "runtime/sim/actor.hpp"

#include <utility>

namespace psplus::sim {

void Actor::start(Task task, nanoseconds delay) {
  task_ = std::move(task);
  suspend(task_.handle(), delay, false);
}

void Actor::stop() noexcept {
  ++ticket_;
  parked_ = false;
  task_.reset();
}

void Actor::notify() {
  if (!parked_) return;
  parked_ = false;
  schedule_resumption(nanoseconds{0});
}

void Actor::suspend(std::coroutine_handle<> handle, nanoseconds delay, bool parks) {
  resume_point_ = handle;
  ++ticket_;
  parked_ = parks;
  if (!parks) schedule_resumption(delay);
}

void Actor::schedule_resumption(nanoseconds delay) {
  scheduler_.after(delay, [this, ticket = ticket_] { resume(ticket); });
}

void Actor::resume(std::uint64_t ticket) {
  if (ticket != ticket_ || !task_) return;
  if (frozen()) {
    scheduler_.at(frozen_until_, [this, ticket] { resume(ticket); });
    return;
  }
  resume_point_.resume();
  if (task_ && task_.done()) {
    const std::exception_ptr error = task_.error();
    stop();
    finished(error);
  }
}

}  // namespace psplus::sim
