// Extents that are added to a stream while it is under way, by each worker when it comes to them.

#include <algorithm>
#include <cmath>
#include <ranges>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::FoundedJob;
using psplus::testing::initial_value;
using psplus::testing::Killed;
using psplus::testing::kStream;
using psplus::testing::ServerHarness;
using psplus::testing::TestWorker;
using ::testing::HasSubstr;

constexpr ExtentId kAdded{1};
constexpr std::uint32_t kSetAll = store::kPushSet | store::kPushAllParams;

store::ExtentLayout base() { return store::ExtentLayout{{{"w", DType::float32, {40}}}, 64}; }
store::ExtentLayout head(std::int64_t size = 20) {
  return store::ExtentLayout{{{"head", DType::float32, {size}}}, 64};
}

wire::OpenStream at(std::uint16_t place, wire::OpenStream how = {}) {
  how.extent = StreamExtent{place};
  return how;
}

/// The last answer about the extent at `place`.
wire::StreamReady ready(const TestWorker& worker, std::uint16_t place = 1) {
  for (const wire::StreamReady& message : worker.got<wire::StreamReady>() | std::views::reverse)
    if (message.extent == StreamExtent{place}) return message;
  ADD_FAILURE() << "no answer about extent " << place;
  return {};
}
std::size_t answers(const TestWorker& worker, std::uint16_t place = 1) {
  const auto all = worker.got<wire::StreamReady>();
  return static_cast<std::size_t>(std::count_if(
      all.begin(), all.end(), [&](const auto& m) { return m.extent == StreamExtent{place}; }));
}

/// Fills the slot of the worker's next push on an added extent, and marks all of it as carried.
void fill(FoundedJob& job, TestWorker& worker, double value, std::uint32_t place = 1) {
  const ExtentId extent{job.control().streams[0].extents[place].load()};
  const store::ExtentLayout& layout = job.store().shard(extent).layout;
  job.bitmap(worker, kStream, place)[0] = 1;
  FoundedJob::write(layout, 0, std::vector<double>(layout.places()[0].scalar_count, value),
                    job.slot(worker, kStream, place));
}
void expect_added(FoundedJob& job, double value, ExtentId extent = kAdded) {
  for (const double found : job.values(extent)) ASSERT_EQ(found, value);
}
void fill_base(FoundedJob& job, TestWorker& worker, double value) {
  job.fill(worker, [&](std::size_t, std::size_t) { return value; });
}
void expect_base(FoundedJob& job, double moved) {
  job.expect_values([&](std::size_t p, std::size_t i) { return initial_value(p, i) - moved; });
}

TEST(Extents, TheFirstToAddOneGivesItsValuesAndNobodyIsWaitedFor) {
  FoundedJob job{2, base()};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  job.open(one, kStream, head(), at(1));
  EXPECT_TRUE(ready(one).provides);
  EXPECT_FALSE(ready(one).rejoined);
  EXPECT_EQ(job.control().extents[1].initialised.load(), 0u);
  fill(job, one, 7);
  ASSERT_OK(job.publish(one, {.flags = kSetAll, .extents = 2}));
  job.run();
  expect_added(job, 7);
  EXPECT_EQ(job.control().extents[1].initialised.load(), 1u);
  EXPECT_EQ(job.counters(kStream, one).clock.load(), 0u) << "first values are no step";

  fill_base(job, zero, 2);  // who has not added it goes on
  ASSERT_OK(job.publish(zero, {.flags = store::kPushAllParams, .extents = 1}));
  fill_base(job, one, 4);
  fill(job, one, 6);
  ASSERT_OK(job.publish(one, {.flags = store::kPushAllParams, .extents = 3}));
  job.run();
  expect_base(job, 3);
  expect_added(job, 4);
  EXPECT_EQ(job.counters(kStream, one).clock.load(), 1u);

  job.open(zero, kStream, head(), at(1));
  EXPECT_TRUE(ready(zero).rejoined);
  EXPECT_FALSE(ready(zero).provides);
  EXPECT_EQ(ready(zero).clock, Step{1});
  expect_added(job, 4);
}

TEST(Extents, OneStepOfBspHoldsPushesOverDifferentExtents) {
  FoundedJob job{2, base(), {.mode = store::Mode::kBsp}};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  job.open(one, kStream, head(), at(1, {.mode = store::Mode::kBsp}));
  fill(job, one, 10);
  ASSERT_OK(job.publish(one, {.flags = kSetAll, .extents = 2}));
  job.run();
  fill_base(job, one, 2);
  fill(job, one, 6);
  ASSERT_OK(job.publish(one, {.flags = store::kPushAllParams, .extents = 3}));
  job.run();
  expect_added(job, 10);
  expect_base(job, 0);
  fill_base(job, zero, 6);
  ASSERT_OK(job.publish(zero, {.flags = store::kPushAllParams, .extents = 1}));
  job.run();
  expect_base(job, 4);
  expect_added(job, 7);  // the mean over all workers: one has nothing for it
  EXPECT_EQ(job.control().streams[0].total_pushes.load(), 2u);
}

TEST(Extents, ABitmapIsHeededInEachExtentThatAPushNames) {
  FoundedJob job{1, base()};
  TestWorker& zero = job.workers[0];
  const store::ExtentLayout two{{{"a", DType::float32, {3}}, {"b", DType::float32, {3}}}, 64};
  job.open(zero, kStream, two, at(1));
  const auto write = [&](double a, double b) {
    FoundedJob::write(two, 0, std::vector<double>(3, a), job.slot(zero, kStream, 1));
    FoundedJob::write(two, 1, std::vector<double>(3, b), job.slot(zero, kStream, 1));
  };
  write(10, 20);
  ASSERT_OK(job.publish(zero, {.flags = kSetAll, .extents = 2}));
  job.run();
  fill_base(job, zero, 1);
  write(std::nan(""), 5);
  job.bitmap(zero, kStream, 1)[0] = 2;
  ASSERT_OK(job.publish(zero, {.flags = 0, .extents = 3}));
  job.run();
  expect_base(job, 1);
  EXPECT_EQ(job.values(kAdded, 0), std::vector<double>(3, 10));
  EXPECT_EQ(job.values(kAdded, 1), std::vector<double>(3, 15));
}

TEST(Extents, ComeInOrder) {
  FoundedJob job{2, base()};
  TestWorker& one = job.workers[1];
  job.open(one, kStream, head(), at(2));
  ASSERT_EQ(one.got<wire::Refused>().size(), 1u);
  EXPECT_EQ(one.got<wire::Refused>()[0].code, StatusCode::kConfig);
  EXPECT_THAT(one.got<wire::Refused>()[0].text,
              HasSubstr("rank 1 registers extent 2 of stream 0 before extent 1"));
  job.open(one, kStream, head(), at(1));
  job.open(job.workers[0], kStream, head(), at(2));  // there is one, but not its own
  EXPECT_EQ(job.workers[0].got<wire::Refused>().size(), 1u);
  job.open(one, kStream, head(3), at(2));
  EXPECT_TRUE(ready(one, 2).provides);
  EXPECT_EQ(job.control().layout_version.load(), 3u);
}

TEST(Extents, OneThatDiffersIsRefusedByItsNumberAndNothingHasChanged) {
  FoundedJob job{2, base()};
  job.open(job.workers[0], kStream, head(20), at(1));
  TestWorker& one = job.workers[1];
  job.open(one, kStream, head(21), at(1));
  ASSERT_EQ(one.got<wire::Refused>().size(), 1u);
  EXPECT_EQ(one.got<wire::Refused>()[0].code, StatusCode::kLayoutMismatch);
  EXPECT_FALSE(one.got<wire::Refused>()[0].fatal);
  EXPECT_THAT(one.got<wire::Refused>()[0].text,
              HasSubstr("parameter group 1 of those added to wrapper 0: parameter 'head' is "
                        "float32 of shape [21] on rank 1, but float32 of shape [20] in the job"));
  EXPECT_EQ(job.counters(kStream, one).extents.load(), 1u);
  job.open(one, kStream, head(20), at(1));
  EXPECT_EQ(answers(one), 1u);
  EXPECT_EQ(job.counters(kStream, one).extents.load(), 3u);
}

TEST(Extents, WhoWrapsWithAllOfThemIsToldThatTheyWereAddedLater) {
  FoundedJob job{2, base()};
  job.open(job.workers[0], kStream, head(), at(1));
  job.lose(job.workers[1]);
  job.run();
  TestWorker& late = job.attach(1, 2);
  job.open(late, kStream,
           store::ExtentLayout{{{"w", DType::float32, {40}}, {"head", DType::float32, {20}}}, 64});
  ASSERT_EQ(late.got<wire::Refused>().size(), 1u);
  EXPECT_THAT(late.got<wire::Refused>()[0].text,
              HasSubstr("the job added 1 parameter group(s) after wrapping"));
}

TEST(Extents, APushOfOneThatItsWorkerHasNotRegisteredIsAnOffence) {
  FoundedJob job{2, base()};
  job.open(job.workers[0], kStream, head(), at(1));
  TestWorker& one = job.workers[1];
  ASSERT_OK(job.publish(one, {.flags = store::kPushAllParams, .extents = 2}));
  job.run();
  EXPECT_FALSE(one.connected);
  EXPECT_THAT(one.got<wire::Refused>().back().text,
              HasSubstr("it carries extents 0x2, registered are 0x1"));
}

TEST(Extents, AnotherOneProvidesWhenTheFirstDiesBefore) {
  FoundedJob job{3, base()};
  TestWorker& two = job.workers[2];
  TestWorker& one = job.workers[1];
  job.open(two, kStream, head(), at(1));
  job.open(one, kStream, head(), at(1));
  EXPECT_TRUE(ready(two).provides) << "who came first, whatever its rank";
  EXPECT_FALSE(ready(one).provides);
  job.lose(two);
  job.run();
  EXPECT_TRUE(ready(one).provides);
  EXPECT_EQ(answers(one), 2u);
  EXPECT_EQ(answers(job.workers[0]), 0u);
}

TEST(Extents, AnotherOneProvidesWhenTheFirstClosesItsStreamBefore) {
  for (const bool published : {false, true}) {
    SCOPED_TRACE(published);
    FoundedJob job{2, base()};
    TestWorker& zero = job.workers[0];
    TestWorker& one = job.workers[1];
    job.open(one, kStream, head(), at(1));
    job.open(zero, kStream, head(), at(1));
    fill(job, one, 7);
    if (published) {
      ASSERT_OK(job.publish(one, {.flags = kSetAll, .extents = 2}));
    }
    job.send(one, wire::CloseStream{kStream});
    EXPECT_EQ(ready(zero).provides, !published);
    job.run();
    EXPECT_EQ(ready(zero).provides, !published);
    EXPECT_EQ(job.control().extents[1].initialised.load(), published ? 1u : 0u);
  }
}

TEST(Extents, RegistrationWaitsUntilEverybodyHoldsItsSegments) {
  FoundedJob job{2, base()};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  zero.answers_offers = false;
  const auto layout = head().serialize();
  job.send(one, at(1), layout, {});
  EXPECT_EQ(answers(one), 0u);
  EXPECT_EQ(job.counters(kStream, one).extents.load(), 1u);
  job.send(zero, wire::Holding{zero.got<wire::Offer>().back().segment});
  EXPECT_TRUE(ready(one).provides);
  EXPECT_EQ(job.counters(kStream, one).extents.load(), 3u);
}

TEST(Extents, TheFirstOnesBlobGoesToTheOthersWhenEverybodyHoldsIt) {
  FoundedJob job{2, base()};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  const std::vector<std::byte> first(3, std::byte{1});
  const std::vector<std::byte> second(3, std::byte{2});
  job.open(one, kStream, head(), at(1), first);
  job.open(zero, kStream, head(), at(1), second);
  const SegmentId blob = ready(zero).blob_segment;
  ASSERT_NE(blob, SegmentId{});
  EXPECT_EQ(ready(one).blob_segment, blob);
  ASSERT_TRUE(zero.held.contains(blob));
  EXPECT_EQ(zero.held.at(blob).bytes[store::kPageBytes], std::byte{1});

  zero.answers_offers = false;
  job.open(one, kStream, head(), at(2), first);
  const SegmentId slots = zero.got<wire::Offer>().back().segment;
  job.send(zero, wire::Holding{slots});
  EXPECT_EQ(answers(one, 2), 0u);
  job.send(zero, wire::Holding{zero.got<wire::Offer>().back().segment});
  EXPECT_NE(ready(one, 2).blob_segment, SegmentId{});
}

TEST(Extents, WhoComesBackFindsThemInTheirOrderWithTheirValues) {
  FoundedJob job{2, base()};
  TestWorker& zero = job.workers[0];
  for (const std::uint16_t place : {std::uint16_t{1}, std::uint16_t{2}}) {
    job.open(zero, kStream, head(place), at(place));
    fill(job, zero, place, place);
    ASSERT_OK(job.publish(zero, {.flags = kSetAll, .extents = std::uint64_t{1} << place}));
    job.run();
  }
  job.lose(job.workers[1]);
  job.run();
  TestWorker& again = job.attach(1, 2);
  job.open(again, kStream, base());
  EXPECT_EQ(job.counters(kStream, again).extents.load(), 1u) << "its former life's do not count";
  for (const std::uint16_t place : {std::uint16_t{1}, std::uint16_t{2}}) {
    job.open(again, kStream, head(place), at(place));
    EXPECT_TRUE(ready(again, place).rejoined);
  }
  fill(job, again, 4, 1);
  fill(job, again, 4, 2);
  ASSERT_OK(job.publish(again, {.flags = store::kPushAllParams, .extents = 6}));
  job.run();
  expect_base(job, 0);
  expect_added(job, 1 - 2, ExtentId{1});
  expect_added(job, 2 - 2, ExtentId{2});
}

TEST(Extents, ACutIsOneOverAllThatItsWorkerHas) {
  FoundedJob job{2, base()};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  job.open(zero, kStream, head(), at(1));
  fill(job, zero, 5);
  ASSERT_OK(job.publish(zero, {.flags = kSetAll, .extents = 2}));
  job.run();
  for (TestWorker* const worker : {&zero, &one}) {
    job.send(*worker, wire::NeedPull{kStream});
    EXPECT_EQ(worker->got<wire::PullReady>().size(), 1u);
  }
  EXPECT_TRUE(job.store().pull(zero.member, kAdded));
  EXPECT_FALSE(job.store().pull(one.member, kAdded));
  job.mail(zero, kStream).cut_requested = 2;
  job.mail(one, kStream).cut_requested = 2;
  job.run();
  const store::PullView first = job.store().pull(zero.member, ExtentId{0});
  const store::PullView second = job.store().pull(zero.member, kAdded);
  EXPECT_EQ(first.header().cuts[0].batch.load(), second.header().cuts[0].batch.load());
  EXPECT_EQ(FoundedJob::values_in(head(), 0, second.values(0)), std::vector<double>(20, 5));
  EXPECT_EQ(job.mail(one, kStream).cut_done.load(), 2u);
}

TEST(Extents, OfNothingAreExtentsToo) {
  FoundedJob job{1, base()};
  TestWorker& zero = job.workers[0];
  job.open(zero, kStream, store::ExtentLayout{{}, 64}, at(1));
  ASSERT_OK(job.publish(zero, {.flags = kSetAll, .extents = 2}));
  job.run();
  EXPECT_EQ(job.control().extents[1].initialised.load(), 1u);
  fill_base(job, zero, 1);
  ASSERT_OK(job.publish(zero, {.flags = store::kPushAllParams, .extents = 3}));
  job.run();
  expect_base(job, 1);
}

// Regression: a push named the number of extents that there were, its server's successor forgot one
// that nobody held, and expelled the worker for naming too many.
TEST(Extents, WhatIsForgottenWithItsServerTakesNoPushWithIt) {
  FoundedJob job{2, base()};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  const SegmentId before = zero.highest();
  job.open(one, kStream, head(), at(1));
  fill_base(job, zero, 2);
  ASSERT_OK(job.publish(zero, {.flags = store::kPushAllParams, .extents = 1}));
  for (TestWorker* const worker : {&zero, &one}) {
    std::erase_if(worker->held, [&](const auto& held) { return held.first > before; });
    worker->inbox.clear();
  }
  job.control().streams[0].members[index(one.member)].extents = 1;  // it was not told either
  ASSERT_OK(job.take_over());
  for (TestWorker* const worker : {&zero, &one}) job.resume(*worker);
  job.run();
  EXPECT_TRUE(zero.connected);
  expect_base(job, 1);
  EXPECT_EQ(job.control().streams[0].extent_count.load(), 1u);
  job.open(one, kStream, head(7), at(1));  // another one, under the same number
  EXPECT_TRUE(ready(one).provides);
}

/// A job with a worker that adds an extent and pushes over both, while the other one pushes.
struct Growth {
  FoundedJob job{2, base(), {}, Config{.piece_bytes = 64}};
  int done = 0;  ///< of the stages below; a stage that a kill cut off is done again

  /// What a worker's program does; after a take-over it goes on where it was.
  void go_on() {
    TestWorker& zero = job.workers[0];
    TestWorker& one = job.workers[1];
    if (done == 0) {
      fill_base(job, zero, 2);
      EXPECT_OK(job.publish(zero, {.flags = store::kPushAllParams, .extents = 1}));
      done = 1;
    }
    if (done == 1) {  // asks again, as a session does
      job.open(one, kStream, head(), at(1));
      done = 2;
    }
    job.run(64);
    if (done == 2) {
      EXPECT_TRUE(ready(one).provides);
      fill(job, one, 7);
      EXPECT_OK(job.publish(one, {.flags = kSetAll, .extents = 2}));
      done = 3;
    }
    job.run(64);
    if (done == 3) {
      fill_base(job, one, 4);
      fill(job, one, 6);
      EXPECT_OK(job.publish(one, {.flags = store::kPushAllParams, .extents = 3}));
      done = 4;
    }
    job.run(64);
    if (done == 4) {
      job.open(zero, kStream, head(), at(1));
      done = 5;
    }
    job.run(64);
  }
  void expect_end() {
    expect_base(job, 3);
    expect_added(job, 4);
    EXPECT_EQ(job.control().streams[0].total_pushes.load(), 2u);
    EXPECT_EQ(job.control().streams[0].extent_count.load(), 2u);
    EXPECT_EQ(job.control().layout_version.load(), 2u);
    EXPECT_TRUE(ready(job.workers[0]).rejoined);
    EXPECT_FALSE(ready(job.workers[0]).provides);
    for (TestWorker& worker : job.workers)
      EXPECT_EQ(job.counters(kStream, worker).extents.load(), 3u);
    EXPECT_EQ(job.mail(job.workers[1], kStream).applied.load(), 2u);
  }
};

// The server is killed at every store that it makes meanwhile, and once more in its recovery.
TEST(Extents, AKillAtEveryStoreGivesTheSameEnd) {
  Growth calm;
  calm.job.kill.arm(~std::uint64_t{0});
  calm.go_on();
  calm.expect_end();
  const std::uint64_t stores = calm.job.kill.count();
  ASSERT_GT(stores, 60u);
  for (std::uint64_t at_store = 0; at_store < stores; ++at_store) {
    for (const std::uint64_t second : {~std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{4}}) {
      SCOPED_TRACE("killed at store " + std::to_string(at_store) + ", then at " +
                   std::to_string(second));
      Growth killed;
      killed.job.kill.arm(at_store);
      ASSERT_THROW(killed.go_on(), Killed);
      try {
        ASSERT_OK(killed.job.take_over(second));
      } catch (const Killed&) {
        ASSERT_OK(killed.job.take_over());
      }
      for (TestWorker& worker : killed.job.workers) killed.job.resume(worker);
      killed.go_on();
      killed.expect_end();
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(Extents, AJobHasAsManyAsItsControlSegmentHasEntries) {
  ServerHarness server;
  TestWorker& worker = server.attach(0, 1);
  constexpr auto kPerStream = static_cast<std::uint16_t>(store::kMaxExtents / store::kMaxStreams);
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s)
    for (std::uint16_t place = 0; place < kPerStream; ++place)
      server.open(worker, StreamId{s}, head(), at(place));
  EXPECT_EQ(server.control().layout_version.load(), store::kMaxExtents);
  EXPECT_TRUE(worker.got<wire::Refused>().empty());
  server.open(worker, StreamId{0}, head(), at(kPerStream));
  const auto refused = worker.got<wire::Refused>();
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].code, StatusCode::kConfig);
  EXPECT_THAT(refused[0].text, HasSubstr("a job has 256 extents at most; wrap fewer optimizers"));
  EXPECT_FALSE(refused[0].fatal);
  EXPECT_EQ(server.state(worker), store::MemberState::kLive);
}

}  // namespace
}  // namespace psplus::server
