#include "server/core.hpp"

#include <algorithm>
#include <cmath>

#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::delta_value;
using psplus::testing::FoundedJob;
using psplus::testing::initial_value;
using psplus::testing::kExtent;
using psplus::testing::kStream;
using psplus::testing::mixed_layout;
using psplus::testing::TestWorker;
using store::MemberState;
using store::PullMode;
using ::testing::HasSubstr;

bool woken(const FoundedJob& job, const TestWorker& worker) {
  return std::any_of(job.wakes.begin(), job.wakes.end(),
                     [&](const Wake& wake) { return wake.member == worker.member; });
}

TEST(Core, RefusesSettingsThatCannotWork) {
  psplus::testing::HeapSource source;
  store::Store store{source};
  ASSERT_OK(store.create(1));
  for (const std::size_t bytes : {0u, 1u, 63u, 100u})
    EXPECT_THROW(Core(store, {.piece_bytes = bytes}), std::invalid_argument) << bytes;
  for (const std::size_t pushes : {std::size_t{0}, store::kMaxBatchPushes + 1})
    EXPECT_THROW(Core(store, {.max_batch_pushes = pushes}), std::invalid_argument) << pushes;
}

TEST(Core, WorksInStepsOfTheBudget) {
  FoundedJob job{1, mixed_layout(), {}, {.piece_bytes = 64}};
  job.push_whole(0, 1);
  job.doorbell();
  int steps = 0;
  while (job.core().step(64, job.now)) {
    EXPECT_TRUE(raw(job.workers[0].queues.at(kStream).applied()) == 1 || !job.core().busy());
    ASSERT_LT(++steps, 1000);
  }
  EXPECT_GT(steps, 10);
  EXPECT_FALSE(job.core().busy());
  job.expect_values(
      [](std::size_t p, std::size_t i) { return initial_value(p, i) - delta_value(0, 1, p, i); });
}

TEST(Core, BoundedStalenessHoldsRepliesAndTheSlowestsDeathReleasesThem) {
  FoundedJob job{2, mixed_layout(), {.bound = 1}};
  TestWorker& fast = job.workers[0];
  const auto& queue = fast.queues.at(kStream);
  for (std::uint64_t n = 1; n <= 3; ++n) {
    ASSERT_OK(job.publish(fast, {.flags = store::kPushEmpty}));
    job.wakes.clear();
    job.run();
    EXPECT_TRUE(woken(job, fast)) << "its slot is free, whether or not the gate opened";
    EXPECT_EQ(raw(queue.applied()), n + 1);
    EXPECT_EQ(raw(queue.released()), std::min<std::uint64_t>(n, 1));
  }
  ASSERT_OK(job.publish(job.workers[1], {.flags = store::kPushEmpty}));
  job.wakes.clear();
  job.run();
  EXPECT_EQ(raw(queue.released()), 2u);
  EXPECT_TRUE(woken(job, fast));
  job.lose(job.workers[1]);
  EXPECT_EQ(raw(queue.released()), 3u);
}

TEST(Core, ABufferedReplyIsACutAndComesWithIt) {
  FoundedJob job{2, mixed_layout(), {.pull = PullMode::kBuffered}};
  TestWorker& zero = job.workers[0];
  for (std::uint64_t n = 1; n <= 3; ++n) {
    job.push_whole(0, n, 2.0);
    job.run();
    ASSERT_EQ(raw(zero.queues.at(kStream).released()), n);
    const store::PullView pull = job.store().pull(zero.member, kExtent);
    const auto& cut = pull.header().cuts[n % 2];
    EXPECT_EQ(cut.total_pushes.load(), n);
    EXPECT_EQ(cut.pushes[index(zero.member)].load(), n);
    for (std::size_t p = 0; p < job.layout.places().size(); ++p) {
      const auto values = FoundedJob::values_in(job.layout, p, pull.values(n % 2));
      for (std::size_t i = 0; i < values.size(); ++i) {
        double expected = initial_value(p, i);
        for (std::uint64_t k = 1; k <= n; ++k) expected -= delta_value(0, k, p, i);
        ASSERT_EQ(values[i], expected) << "push " << n << ", parameter " << p << ", scalar " << i;
      }
    }
  }
}

TEST(Core, TwoBufferedStepsAtOnceGetACutEach) {
  FoundedJob job{1, mixed_layout(), {.pull = PullMode::kBuffered}};
  job.push_whole(0, 1);
  job.push_whole(0, 2);
  job.run();
  EXPECT_EQ(raw(job.workers[0].queues.at(kStream).released()), 2u);
}

TEST(Core, ARequestedCutIsTakenIntoTheBufferAskedFor) {
  FoundedJob job{1, mixed_layout()};
  TestWorker& zero = job.workers[0];
  job.send(zero, wire::NeedPull{kStream});
  for (const std::uint64_t buffer : {0u, 1u}) {
    job.push_whole(0, buffer + 1);
    job.run();  // a worker asks for a cut when its pushes are in
    job.mail(zero, kStream).cut_requested = (buffer + 1) << 1 | buffer;
    job.run();
    EXPECT_EQ(job.mail(zero, kStream).cut_done.load(), (buffer + 1) << 1 | buffer);
    const auto values =
        FoundedJob::values_in(job.layout, 2, job.store().pull(zero.member, kExtent).values(buffer));
    EXPECT_EQ(values, job.values(kExtent, 2));
  }
}

TEST(Core, OneStreamsTrafficDoesNotStarveAnother) {
  FoundedJob job{1, mixed_layout()};
  TestWorker& zero = job.workers[0];
  const StreamId second{1};
  job.open(zero, second, store::ExtentLayout{{{"x", DType::float32, {1}}}, 64});
  ASSERT_OK(zero.queues.at(second).publish({.flags = store::kPushEmpty}));
  ASSERT_OK(job.publish(zero, {.flags = store::kPushEmpty}));
  int steps = 0;
  while (raw(zero.queues.at(second).applied()) == 0) {
    ASSERT_LT(++steps, 4);
    job.core().step(~std::size_t{0}, job.now);
    ASSERT_OK(job.publish(zero, {.flags = store::kPushEmpty}));
    while (!zero.queues.at(kStream).slot_is_free()) job.core().step(~std::size_t{0}, job.now);
  }
}

TEST(Core, AnOffenderIsExpelledAndTheOthersTrainOn) {
  FoundedJob job{3, mixed_layout(), {.mode = store::Mode::kBsp}};
  TestWorker& bad = job.workers[2];
  job.push_whole(0, 1);
  job.push_whole(1, 1);
  ASSERT_OK(job.publish(bad, {.flags = 0x80, .extents = 1}));
  job.run();
  ASSERT_EQ(bad.got<wire::Refused>().size(), 1u);
  EXPECT_TRUE(bad.got<wire::Refused>()[0].fatal);
  EXPECT_EQ(bad.got<wire::Refused>()[0].code, StatusCode::kClosed);
  EXPECT_THAT(bad.got<wire::Refused>()[0].text,
              HasSubstr("expelled this worker: push 1 on stream 0: its flags 0x80 are unknown"));
  EXPECT_FALSE(bad.connected);
  EXPECT_TRUE(bad.queues.at(kStream).closed());
  EXPECT_EQ(job.state(bad), MemberState::kFree);
  for (std::uint64_t n = 2; n <= 3; ++n) {
    job.push_whole(0, n);
    job.push_whole(1, n);
    job.run();
  }
  job.expect_values([](std::size_t p, std::size_t i) {
    double value = initial_value(p, i);
    for (std::uint64_t n = 1; n <= 3; ++n)
      value -= 0.5 * (delta_value(0, n, p, i) + delta_value(1, n, p, i));
    return value;
  });
  TestWorker& again = job.attach(2, 3);
  EXPECT_EQ(again.got<wire::Attached>().size(), 1u) << "its next life is welcome";
}

// Regression: the batch with the offender's valid first push lost its slots before it was applied.
TEST(Core, AnOffendersValidPushOfTheSameBatchCounts) {
  FoundedJob job{2, mixed_layout()};
  job.push_whole(1, 1);
  ASSERT_OK(job.publish(job.workers[1],
                        {.flags = store::kPushAllParams, .extents = 1, .lambda = std::nan("")}));
  job.push_whole(0, 1);
  job.run();
  EXPECT_EQ(job.state(job.workers[1]), MemberState::kFree);
  EXPECT_EQ(job.counters(kStream, job.workers[1]).pushes.load(), 1u);
  EXPECT_EQ(std::count_if(job.log.begin(), job.log.end(),
                          [](const std::string& line) {
                            return line.find("is expelled") != std::string::npos;
                          }),
            1);
  job.expect_values([](std::size_t p, std::size_t i) {
    return initial_value(p, i) - 0.5 * delta_value(0, 1, p, i) - 0.5 * delta_value(1, 1, p, i);
  });
}

TEST(Core, SteadyTrafficDoesNotPutAnExpulsionOff) {
  FoundedJob job{2, mixed_layout()};
  ASSERT_OK(job.publish(job.workers[1], {.flags = 0x80}));
  for (int turn = 0; turn < 3; ++turn) {
    ASSERT_OK(job.publish(job.workers[0], {.flags = store::kPushEmpty}));
    ASSERT_TRUE(job.core().step(~std::size_t{0}, job.now));
  }
  EXPECT_EQ(job.state(job.workers[1]), MemberState::kFree);
}

// Regression: the gate that an expulsion opened queued a cut that nobody then took.
TEST(Core, ExpellingTheSlowestReleasesBufferedReplies) {
  FoundedJob job{2, mixed_layout(), {.pull = PullMode::kBuffered, .bound = 0}};
  job.push_whole(0, 1);
  job.run();
  EXPECT_EQ(raw(job.workers[0].queues.at(kStream).released()), 0u);
  ASSERT_OK(job.publish(job.workers[1], {.flags = 0x80}));
  job.run();
  EXPECT_EQ(raw(job.workers[0].queues.at(kStream).released()), 1u);
}

TEST(Core, ADeadWorkersBadPushIsDiscardedAndItsPlaceFreed) {
  FoundedJob job{2, mixed_layout()};
  ASSERT_OK(job.publish(job.workers[1], {.flags = 0x80, .extents = 1}));
  job.lose(job.workers[1]);
  job.run();
  EXPECT_EQ(job.state(job.workers[1]), MemberState::kFree);
  job.expect_values(initial_value);
}

}  // namespace
}  // namespace psplus::server
