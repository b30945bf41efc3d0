#include "c10d/origin.hpp"

#include <atomic>

#include <pthread.h>
#include <unistd.h>

namespace psplus::pg {
namespace {

std::atomic<pid_t> current{0};

bool remember() noexcept {
  const auto note = [] { current.store(::getpid(), std::memory_order_relaxed); };
  note();
  return ::pthread_atfork(nullptr, nullptr, note) == 0;
}

}  // namespace

pid_t this_process() noexcept {
  static const bool remembered = remember();
  return remembered ? current.load(std::memory_order_relaxed) : ::getpid();
}

}  // namespace psplus::pg
