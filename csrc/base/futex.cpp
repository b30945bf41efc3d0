#include "base/futex.hpp"

#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace psplus {
namespace {

void wake_all(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void notify(WakeWord& word) noexcept {
  word.sequence.fetch_add(1, std::memory_order_seq_cst);
  // Pairs with the increment in wait_until(): either this sees the waiter, or the waiter's own
  // load of `sequence` sees the increment above and it does not sleep.
  if (word.waiters.load(std::memory_order_seq_cst) != 0) wake_all(word.sequence);
}

void notify_always(WakeWord& word) noexcept {
  word.sequence.fetch_add(1, std::memory_order_seq_cst);
  wake_all(word.sequence);
}

void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
              Deadline deadline) noexcept {
  const auto left = deadline.left();
  constexpr nanoseconds kLongest = std::chrono::hours{24};
  const auto sleep = left < kLongest ? left : kLongest;
  const timespec timeout{.tv_sec = static_cast<time_t>(sleep.count() / 1'000'000'000),
                         .tv_nsec = static_cast<long>(sleep.count() % 1'000'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace psplus
