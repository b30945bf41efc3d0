#include "base/futex.hpp"

#include <thread>
#include <vector>

#include "base/segment.hpp"
#include "support/child_process.hpp"
#include "support/status_matchers.hpp"

namespace psplus {
namespace {

using psplus::testing::ChildProcess;
using std::chrono::seconds;

// The longest that a wait which should end may last; only a failing test waits so long.
constexpr seconds kLong{30};

/// Waits without a wake-up of its own: used to learn that somebody else has gone to sleep.
bool waits_for(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const Deadline deadline = Deadline::after(kLong);
  while (word.load() != value) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(WaitUntil, TrueConditionNeedsNoWait) {
  WakeWord word{};
  EXPECT_TRUE(wait_until(word, Deadline::after(nanoseconds{0}), [] { return true; }));
  EXPECT_EQ(word.waiters.load(), 0u);
}

TEST(WaitUntil, DeadlineEndsItAndTheLastLookCounts) {
  WakeWord word{};
  const TimePoint before = Clock::now();
  EXPECT_FALSE(wait_until(word, Deadline::after(milliseconds{30}), [] { return false; }));
  EXPECT_GE(Clock::now() - before, milliseconds{30});
  EXPECT_LT(Clock::now() - before, kLong);
  EXPECT_EQ(word.waiters.load(), 0u);

  // Becomes true only at the look after the deadline.
  int looks = 0;
  EXPECT_TRUE(
      wait_until(word, Deadline::after(nanoseconds{0}), [&] { return ++looks > kSpinTurns; }));
}

TEST(WaitUntil, NotifyWakesEveryThread) {
  WakeWord word{};
  std::atomic<int> value{0};
  std::vector<std::thread> threads;
  std::atomic<int> woken{0};
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      if (wait_until(word, Deadline::after(kLong), [&] { return value.load() == 7; })) ++woken;
    });
  EXPECT_TRUE(waits_for(word.waiters, 3));
  notify(word);  // nothing has changed: they look and sleep again
  value = 7;
  notify(word);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(woken.load(), 3);
  EXPECT_EQ(word.waiters.load(), 0u);
}

TEST(WaitUntil, NoChangeIsMissedBetweenTwoThreadsThatTakeTurns) {
  constexpr std::uint32_t kTurns = 5000;
  WakeWord word{};
  std::atomic<std::uint32_t> turn{0};
  const auto play = [&](std::uint32_t parity) {
    for (std::uint32_t t = parity; t < kTurns; t += 2) {
      if (!wait_until(word, Deadline::after(kLong), [&] { return turn.load() == t; })) return false;
      turn = t + 1;
      notify(word);
    }
    return true;
  };
  bool other_ended = false;
  std::thread other{[&] { other_ended = play(1); }};
  EXPECT_TRUE(play(0));
  other.join();
  EXPECT_TRUE(other_ended);
  EXPECT_EQ(turn.load(), kTurns);
}

struct Shared {
  WakeWord word;
  WakeWord back;
  std::atomic<std::uint32_t> value;
};

TEST(WaitUntil, WakesAProcessThatMapsTheSegment) {
  const auto segment = Segment::create("psplus-test", sizeof(Shared));
  ASSERT_OK(segment);
  auto& shared = *reinterpret_cast<Shared*>(segment->bytes().data());
  ChildProcess child{[&] {
    auto fd = segment->fd().duplicate();
    auto mapped = Segment::map(std::move(fd).value(), sizeof(Shared), Access::kReadWrite);
    if (!mapped.ok()) return 1;
    auto& own = *reinterpret_cast<Shared*>(mapped->bytes().data());
    for (std::uint32_t turn = 1; turn < 1000; turn += 2) {
      if (!wait_until(own.word, Deadline::after(kLong), [&] { return own.value.load() == turn; }))
        return 2;
      own.value = turn + 1;
      notify(own.back);
    }
    return 0;
  }};
  EXPECT_TRUE(waits_for(shared.word.waiters, 1));
  for (std::uint32_t turn = 0; turn < 1000; turn += 2) {
    ASSERT_TRUE(wait_until(shared.back, Deadline::after(kLong),
                           [&] { return shared.value.load() == turn; }));
    shared.value = turn + 1;
    notify(shared.word);
  }
  EXPECT_EQ(child.exit_code(), 0);
}

TEST(WaitUntil, AKilledWaiterLeavesTheWordUsable) {
  const auto segment = Segment::create("psplus-test", sizeof(Shared));
  ASSERT_OK(segment);
  auto& shared = *reinterpret_cast<Shared*>(segment->bytes().data());
  ChildProcess victim{[&] {
    return wait_until(shared.word, Deadline::after(kLong), [] { return false; }) ? 1 : 0;
  }};
  ASSERT_TRUE(waits_for(shared.word.waiters, 1));
  victim.kill();
  EXPECT_EQ(shared.word.waiters.load(), 1u);  // it could not say goodbye
  std::thread waiter{[&] {
    EXPECT_TRUE(
        wait_until(shared.word, Deadline::after(kLong), [&] { return shared.value.load() == 1; }));
  }};
  EXPECT_TRUE(waits_for(shared.word.waiters, 2));
  shared.value = 1;
  notify(shared.word);
  waiter.join();
}

TEST(SleepOn, AReaderOfAReadOnlyMappingIsWokenByNotifyAlways) {
  const auto segment = Segment::create("psplus-test", sizeof(Shared));
  ASSERT_OK(segment);
  auto& shared = *reinterpret_cast<Shared*>(segment->bytes().data());
  ChildProcess child{[&] {
    auto fd = segment->fd().duplicate();
    const auto mapped = Segment::map(std::move(fd).value(), sizeof(Shared), Access::kReadOnly);
    if (!mapped.ok()) return 1;
    const auto& own = *reinterpret_cast<const Shared*>(mapped->bytes().data());
    const Deadline deadline = Deadline::after(kLong);
    shared.back.sequence = 1;  // by the inherited mapping: about to sleep
    for (;;) {
      const std::uint32_t seen = own.word.sequence.load();
      if (own.value.load() == 9) return 0;
      if (deadline.passed()) return 2;
      // Far beyond `deadline`: only a wake-up ends this in time.
      sleep_on(own.word.sequence, seen, Deadline::after(2 * kLong));
    }
  }};
  ASSERT_TRUE(waits_for(shared.back.sequence, 1));
  std::this_thread::sleep_for(milliseconds{50});  // most likely asleep by now
  EXPECT_EQ(shared.word.waiters.load(), 0u);
  shared.value = 9;
  notify_always(shared.word);
  EXPECT_EQ(child.exit_code(kLong / 2), 0);
}

TEST(SleepOn, ReturnsAtOnceWhenTheWordHasMoved) {
  WakeWord word{};
  word.sequence = 5;
  const TimePoint before = Clock::now();
  sleep_on(word.sequence, 4, Deadline::after(kLong));
  EXPECT_LT(Clock::now() - before, kLong / 2);
}

TEST(SleepOn, PassedDeadlineDoesNotSleep) {
  WakeWord word{};
  const TimePoint before = Clock::now();
  sleep_on(word.sequence, 0, Deadline::after(seconds{-1}));
  EXPECT_LT(Clock::now() - before, kLong / 2);
}

}  // namespace
}  // namespace psplus
