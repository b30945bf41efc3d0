#include "runtime/sim/scheduler.hpp"

#include <algorithm>
#include <utility>

namespace psplus::sim {

void Scheduler::at(TimePoint time, Action action) {
  heap_.push_back({std::max(time, now_), next_order_++, std::move(action)});
  std::push_heap(heap_.begin(), heap_.end(), later);
}

bool Scheduler::run_next() {
  if (heap_.empty()) return false;
  std::pop_heap(heap_.begin(), heap_.end(), later);
  const Entry entry = std::move(heap_.back());
  heap_.pop_back();
  now_ = std::max(now_, entry.time);
  ++actions_run_;
  entry.action();
  return true;
}

void Scheduler::advance_to(TimePoint time) {
  while (!heap_.empty() && heap_.front().time <= time) run_next();
  now_ = std::max(now_, time);
}

}  // namespace psplus::sim
