#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.hpp"

namespace psplus {

/// A word in shared memory on which processes wait for something else to change. Whoever changes
/// that something calls `notify` afterwards; a waiter that was killed costs later notifiers one
/// system call each and nothing more. Must be zero-initialised.
struct alignas(64) WakeWord {
  std::atomic<std::uint32_t> sequence;
  std::atomic<std::uint32_t> waiters;
};
static_assert(sizeof(WakeWord) == 64);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Wakes everybody who waits on `word`. Cheap (no system call) when nobody sleeps.
void notify(WakeWord& word) noexcept;

/// Sleeps until `word` differs from `seen`, a signal arrives or `deadline` passes; may return
/// early. The caller has read `seen` before it looked at its condition. `word` may be mapped
/// read-only; its notifier must then use `notify_always`, because such a waiter cannot announce
/// itself.
void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
              Deadline deadline) noexcept;

/// Wakes everybody without looking at `waiters`: for words that waiters map read-only.
void notify_always(WakeWord& word) noexcept;

/// Looks at the condition this often before going to sleep. Some microseconds: longer spinning
/// would take the core from the very process that is waited for when processes exceed cores.
inline constexpr int kSpinTurns = 200;

/// Waits until `ready()` or `deadline`; returns what `ready()` said last. `word` must be writable.
template <class Ready>
[[nodiscard]] bool wait_until(WakeWord& word, Deadline deadline, Ready ready) {
  for (int turn = 0; turn < kSpinTurns; ++turn)
    if (ready()) return true;
  word.waiters.fetch_add(1, std::memory_order_seq_cst);  // pairs with the load in notify()
  bool done = false;
  for (;;) {
    const std::uint32_t seen = word.sequence.load(std::memory_order_seq_cst);
    done = ready();
    if (done || deadline.passed()) break;
    sleep_on(word.sequence, seen, deadline);
  }
  word.waiters.fetch_sub(1, std::memory_order_relaxed);
  return done;
}

}  // namespace psplus
