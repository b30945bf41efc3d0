#include "server/registry.hpp"

#include <cstring>
#include <string>

#include "server/gate.hpp"
#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::delta_value;
using psplus::testing::FoundedJob;
using psplus::testing::initial_value;
using psplus::testing::kExtent;
using psplus::testing::kStream;
using psplus::testing::ServerHarness;
using psplus::testing::TestWorker;
using store::Mode;
using store::PullMode;
using ::testing::HasSubstr;

constexpr StreamId kSecond{1};

store::ExtentLayout small(std::int64_t size = 9) {
  return store::ExtentLayout{{{"fc.weight", DType::float32, {size}}}, 64};
}
std::vector<std::byte> bytes_of(std::string_view text) {
  const auto* const at = reinterpret_cast<const std::byte*>(text.data());
  return {at, at + text.size()};
}
/// The last StreamReady of a stream; fails when there is none.
wire::StreamReady ready(const TestWorker& worker, StreamId stream = kStream) {
  wire::StreamReady last{};
  bool found = false;
  for (const auto& message : worker.got<wire::StreamReady>())
    if (message.stream == stream) last = message, found = true;
  EXPECT_TRUE(found) << "rank " << worker.rank << " got no answer";
  return last;
}
bool answered(const TestWorker& worker) { return !worker.got<wire::StreamReady>().empty(); }

TEST(Registry, FoundingWaitsForEverybodyAndRankZeroProvides) {
  ServerHarness server;
  for (const std::uint32_t rank : {2u, 1u, 0u}) server.attach(rank, 3);
  TestWorker& two = server.workers[0];
  TestWorker& one = server.workers[1];
  TestWorker& zero = server.workers[2];
  server.open(two, kStream, small());
  server.open(zero, kStream, small());
  EXPECT_FALSE(answered(two));
  EXPECT_FALSE(answered(zero));
  server.open(one, kStream, small());
  EXPECT_TRUE(ready(zero).provides);
  EXPECT_FALSE(ready(one).provides);
  EXPECT_FALSE(ready(two).provides);
  for (const TestWorker* worker : {&zero, &one, &two}) {
    EXPECT_FALSE(ready(*worker).rejoined);
    EXPECT_EQ(ready(*worker).clock, Step{0});
    EXPECT_EQ(ready(*worker).blob_segment, SegmentId{});
    EXPECT_EQ(server.control().members[index(worker->member)].founder.load(), 1u);
  }
}

TEST(Registry, AWorkerThatDiesBeforeTheFoundingIsWaitedForAgain) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  TestWorker& one = server.attach(1, 2);
  server.open(one, kStream, small());
  server.lose(one);
  server.run();
  server.open(zero, kStream, small());
  EXPECT_FALSE(answered(zero));
  TestWorker& again = server.attach(1, 2);
  server.open(again, kStream, small());
  EXPECT_TRUE(ready(zero).provides);
  EXPECT_FALSE(ready(again).provides);
}

TEST(Registry, TheProvidersBlobGoesToEverybody) {
  ServerHarness server;
  TestWorker& one = server.attach(1, 2);
  TestWorker& zero = server.attach(0, 2);
  server.open(one, kStream, small(), {}, bytes_of("rank one's state"));
  server.open(zero, kStream, small(), {}, bytes_of("rank zero's state"));
  const SegmentId blob = ready(one).blob_segment;
  EXPECT_NE(blob, SegmentId{});
  EXPECT_EQ(ready(zero).blob_segment, blob);
  ASSERT_TRUE(one.held.contains(blob));
  const auto content = one.held.at(blob).bytes.subspan(store::kPageBytes);
  EXPECT_EQ(std::vector<std::byte>(content.begin(), content.end()), bytes_of("rank zero's state"));
}

TEST(Registry, ALayoutThatDiffersIsRefusedAndTheWorkerMayTryAgain) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  TestWorker& one = server.attach(1, 2);
  server.open(zero, kStream, small(9));
  server.open(one, kStream, small(8));
  ASSERT_EQ(one.got<wire::Refused>().size(), 1u);
  EXPECT_EQ(one.got<wire::Refused>()[0].code, StatusCode::kLayoutMismatch);
  EXPECT_FALSE(one.got<wire::Refused>()[0].fatal);
  EXPECT_THAT(one.got<wire::Refused>()[0].text,
              HasSubstr("parameter 'fc.weight' is float32 of shape [8] on rank 1, but float32 of "
                        "shape [9] in the job"));
  EXPECT_TRUE(zero.got<wire::Refused>().empty());
  server.open(one, kStream, small(9));
  EXPECT_TRUE(ready(zero).provides);
  EXPECT_TRUE(answered(one));
}

TEST(Registry, WhoWaitsForARefusedWorkerIsToldWhenItEnds) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 3);
  TestWorker& one = server.attach(1, 3);
  TestWorker& two = server.attach(2, 3);
  server.open(zero, kStream, small(9));
  server.open(one, kStream, small(8));
  EXPECT_TRUE(zero.got<wire::Refused>().empty()) << "rank 1 may try again";
  server.lose(one);
  ASSERT_EQ(zero.got<wire::Refused>().size(), 1u);
  EXPECT_EQ(zero.got<wire::Refused>()[0].code, StatusCode::kLayoutMismatch);
  EXPECT_FALSE(zero.got<wire::Refused>()[0].fatal);
  EXPECT_THAT(zero.got<wire::Refused>()[0].text,
              HasSubstr("the job cannot begin, as rank 1 was refused and has ended: parameter "
                        "'fc.weight' is float32 of shape [8] on rank 1"));
  server.open(two, kStream, small(9));  // comes later and is told the same
  ASSERT_EQ(two.got<wire::Refused>().size(), 1u);

  TestWorker& corrected = server.attach(1, 3);
  server.open(corrected, kStream, small(9));
  server.open(zero, kStream, small(9));
  server.open(two, kStream, small(9));
  EXPECT_EQ(two.got<wire::Refused>().size(), 1u);
  EXPECT_TRUE(ready(zero).provides);
  EXPECT_TRUE(answered(two));
  EXPECT_TRUE(answered(corrected));
}

TEST(Registry, ARefusedWorkerThatEndsDoesNotDisturbAJobThatHasBegun) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  TestWorker& one = server.attach(1, 2);
  server.open(zero, kStream, small(9));
  server.open(one, kStream, small(9));
  EXPECT_TRUE(answered(zero));
  server.lose(one);
  TestWorker& again = server.attach(1, 2);
  server.open(again, kStream, small(8));
  ASSERT_EQ(again.got<wire::Refused>().size(), 1u);
  server.lose(again);
  EXPECT_TRUE(zero.got<wire::Refused>().empty());
}

TEST(Registry, ASchemeThatDiffersNamesBoth) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  TestWorker& one = server.attach(1, 2);
  server.open(zero, kStream, small(), {.mode = Mode::kBsp});
  server.open(one, kStream, small(), {.pull = PullMode::kBuffered, .bound = 4});
  ASSERT_EQ(one.got<wire::Refused>().size(), 1u);
  EXPECT_EQ(one.got<wire::Refused>()[0].code, StatusCode::kConfig);
  EXPECT_THAT(
      one.got<wire::Refused>()[0].text,
      HasSubstr(
          "wrapper 0 is asynchronous, buffered pull, staleness bound 4, stepped by workers on "
          "rank 1, but bsp, mapped pull, no staleness bound, stepped by workers in the job"));
  server.open(one, kStream, small(), {.mode = Mode::kBsp, .bound = 4});
  EXPECT_EQ(one.got<wire::Refused>().size(), 2u);
}

TEST(Registry, WhoStepsAndWithHowMuchStateIsTheSameForAll) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  TestWorker& one = server.attach(1, 2);
  const wire::OpenStream sgd{.rule = {store::RuleKind::kSgd, 1}};
  server.open(zero, kStream, small(), sgd);
  server.open(one, kStream, small(), {.rule = {store::RuleKind::kAdam, 2}});
  server.open(one, kStream, small(), {.rule = {store::RuleKind::kSgd, 0}});
  const auto refused = one.got<wire::Refused>();
  ASSERT_EQ(refused.size(), 2u);
  EXPECT_EQ(refused[0].code, StatusCode::kConfig);
  EXPECT_THAT(refused[0].text, HasSubstr("stepped by servers with Adam on rank 1"));
  EXPECT_THAT(refused[0].text, HasSubstr("stepped by servers with SGD in the job"));
  EXPECT_EQ(refused[1].code, StatusCode::kConfig);
  EXPECT_THAT(refused[1].text, HasSubstr("rank 1 needs 0 value(s) of state for each parameter "
                                         "value, the job keeps 1"));
  server.open(one, kStream, small(), sgd);
  EXPECT_TRUE(ready(zero).provides);
  EXPECT_EQ(server.store().shard(ExtentId{0}).view.rule(), sgd.rule);
  EXPECT_EQ(server.control().streams[0].rule.load(), raw(sgd.rule.kind));

  // An added group may keep another amount of state, but is stepped by the same rule.
  server.open(zero, kStream, small(),
              {.extent = StreamExtent{1}, .rule = {store::RuleKind::kAdagrad, 1}});
  ASSERT_EQ(zero.got<wire::Refused>().size(), 1u);
  EXPECT_THAT(
      zero.got<wire::Refused>()[0].text,
      HasSubstr("a group added to wrapper 0 is stepped by servers with Adagrad, the wrapper "
                "is stepped by servers with SGD"));
  server.open(zero, kStream, small(),
              {.extent = StreamExtent{1}, .rule = {store::RuleKind::kSgd, 0}});
  EXPECT_EQ(zero.got<wire::Refused>().size(), 1u);
  EXPECT_EQ(server.store().shard(ExtentId{1}).view.rule().planes, 0u);
}

TEST(Registry, DamagedLayoutsAndStreamsOutOfOrderAreRefused) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 1);
  server.send(zero, wire::OpenStream{.stream = kStream}, bytes_of("nonsense"));
  ASSERT_EQ(zero.got<wire::Refused>().size(), 1u);
  EXPECT_THAT(zero.got<wire::Refused>()[0].text, HasSubstr("a damaged layout"));
  server.open(zero, StreamId{2}, small());
  ASSERT_EQ(zero.got<wire::Refused>().size(), 2u);
  EXPECT_THAT(zero.got<wire::Refused>()[1].text,
              HasSubstr("rank 0 registers stream 2 before stream 1"));
  server.open(zero, kStream, small());
  EXPECT_TRUE(ready(zero).provides);
}

TEST(Registry, MessagesBeforeAnAttachAreIgnored) {
  ServerHarness server;
  TestWorker& stranger = server.connect();
  const auto layout = small().serialize();
  server.send(stranger, wire::OpenStream{.stream = kStream}, layout);
  for (const wire::ToServer& message :
       {wire::ToServer{wire::Holding{SegmentId{9}}}, wire::ToServer{wire::NeedPull{kStream}},
        wire::ToServer{wire::CloseStream{kStream}}, wire::ToServer{wire::Detach{}}})
    server.send(stranger, message);
  server.lose(stranger);
  EXPECT_EQ(server.control().streams[0].open.load(), 0u);
  EXPECT_TRUE(stranger.inbox.empty());
  EXPECT_EQ(server.attach(0, 1).got<wire::Attached>().size(), 1u);
}

TEST(Registry, ALaterStreamTakesItsFirstRegistrantsValuesAndWaitsForNobody) {
  FoundedJob job{2, small()};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  job.open(one, kSecond, small(3), {.bound = 0});
  EXPECT_TRUE(ready(one, kSecond).provides);
  ASSERT_OK(one.queues.at(kSecond).publish(
      {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
  ASSERT_OK(one.queues.at(kSecond).publish({.flags = store::kPushEmpty}));
  job.run();
  EXPECT_EQ(raw(one.queues.at(kSecond).applied()), 2u);
  EXPECT_EQ(raw(one.queues.at(kSecond).released()), 0u) << "rank 0 founded the job and will come";
  job.open(zero, kSecond, small(3), {.bound = 0});
  EXPECT_FALSE(ready(zero, kSecond).provides);
  EXPECT_TRUE(ready(zero, kSecond).rejoined);
  EXPECT_EQ(ready(zero, kSecond).clock, Step{0});
  ASSERT_OK(zero.queues.at(kSecond).publish({.flags = store::kPushEmpty}));
  job.run();
  EXPECT_EQ(raw(one.queues.at(kSecond).released()), 1u);
}

// Regression: only the first stream's applicants were answered by the founding.
TEST(Registry, AStreamAskedForBeforeTheFoundingIsAnsweredByIt) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  TestWorker& one = server.attach(1, 2);
  server.open(zero, kStream, small());
  server.open(zero, kSecond, small(3));
  EXPECT_FALSE(answered(zero));
  server.open(one, kStream, small());
  EXPECT_TRUE(ready(zero, kStream).provides);
  EXPECT_TRUE(ready(zero, kSecond).provides);
}

TEST(Registry, WhenTheProviderDiesWithoutValuesTheNextRankProvides) {
  ServerHarness server;
  for (const std::uint32_t rank : {0u, 1u, 2u}) server.attach(rank, 3);
  for (TestWorker& worker : server.workers) server.open(worker, kStream, small());
  server.lose(server.workers[0]);
  server.run();
  EXPECT_TRUE(ready(server.workers[1]).provides);
  EXPECT_FALSE(ready(server.workers[2]).provides);
  EXPECT_EQ(server.workers[2].got<wire::StreamReady>().size(), 1u);
  server.lose(server.workers[1]);
  server.run();
  EXPECT_TRUE(ready(server.workers[2]).provides);
}

TEST(Registry, AProviderThatDiedWithItsValuesPublishedHasProvided) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  TestWorker& one = server.attach(1, 2);
  for (TestWorker* worker : {&zero, &one}) server.open(*worker, kStream, small(2));
  const double values[] = {3, 4};
  ASSERT_OK(server.push(zero, kStream, values,
                        {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
  server.lose(zero);
  EXPECT_FALSE(ready(one).provides);
  server.run();
  EXPECT_EQ(one.got<wire::StreamReady>().size(), 1u) << "nobody else is asked";
  EXPECT_EQ(server.values(kExtent), (std::vector<double>{3, 4}));
  EXPECT_EQ(server.control().extents[0].initialised.load(), 1u);
}

// Regression: a successor did not know whom its predecessor had asked for the values.
TEST(Registry, TheProviderIsKnownToASuccessor) {
  for (const bool provider_lives : {true, false}) {
    SCOPED_TRACE(provider_lives);
    ServerHarness server;
    for (const std::uint32_t rank : {0u, 1u}) server.attach(rank, 2);
    for (TestWorker& worker : server.workers) server.open(worker, kStream, small());
    TestWorker& zero = server.workers[0];
    TestWorker& one = server.workers[1];
    ASSERT_OK(server.take_over());
    for (TestWorker& worker : server.workers) worker.inbox.clear();
    server.resume(one);
    if (provider_lives) server.resume(zero);
    server.open(one, kStream, small());  // not answered by the predecessor, as far as it knows
    server.tick(std::chrono::seconds{4});
    server.run();
    EXPECT_EQ(ready(one).provides, !provider_lives);
  }
}

TEST(Registry, ALateJoinerEntersAtTheSlowestsClock) {
  FoundedJob job{3, small()};
  job.lose(job.workers[2]);
  for (int n = 0; n < 5; ++n) {
    ASSERT_OK(job.publish(job.workers[0], {.flags = store::kPushEmpty}));
    if (n < 3) {
      ASSERT_OK(job.publish(job.workers[1], {.flags = store::kPushEmpty}));
    }
    job.run();
  }
  TestWorker& late = job.attach(2, 3);
  job.open(late, kStream, job.layout);
  EXPECT_EQ(ready(late).clock, Step{3});
  EXPECT_TRUE(ready(late).rejoined);
  EXPECT_FALSE(ready(late).provides);
  EXPECT_EQ(job.counters(kStream, late).clock.load(), 3u);
  EXPECT_EQ(job.counters(kStream, late).pushes.load(), 0u);
  EXPECT_EQ(job.mail(late, kStream).released.load(), 3u);
  ASSERT_OK(job.publish(late, {.flags = store::kPushEmpty}));
  job.run();
  EXPECT_EQ(job.counters(kStream, late).clock.load(), 4u);
  EXPECT_EQ(job.counters(kStream, late).pushes.load(), 1u);
}

TEST(Registry, RegistrationWaitsUntilEverybodyHoldsTheSlots) {
  FoundedJob job{3, small()};
  job.lose(job.workers[2]);
  job.run();
  TestWorker& late = job.attach(2, 3);
  job.workers[0].answers_offers = false;
  const auto layout = job.layout.serialize();
  job.send(late, wire::OpenStream{.stream = kStream}, layout);
  EXPECT_FALSE(answered(late));
  EXPECT_EQ(job.counters(kStream, late).state.load(), raw(store::StreamMemberState::kAbsent));
  job.send(job.workers[0], wire::Holding{job.workers[0].got<wire::Offer>().back().segment});
  EXPECT_TRUE(ready(late).rejoined);
  EXPECT_EQ(job.counters(kStream, late).state.load(), raw(store::StreamMemberState::kRegistered));
}

// Regression: after a take-over the slots were found, and nobody was asked whether he holds them.
TEST(Registry, SlotsFoundByASuccessorMustBeHeldByEverybodyToo) {
  FoundedJob job{3, small()};
  job.lose(job.workers[2]);
  job.run();
  TestWorker& late = job.attach(2, 3);
  TestWorker& zero = job.workers[0];
  zero.answers_offers = false;
  const auto layout = job.layout.serialize();
  job.send(late, wire::OpenStream{.stream = kStream}, layout);
  zero.held.erase(zero.highest());  // the slots never reached it
  ASSERT_OK(job.take_over());
  for (TestWorker* worker : {&zero, &job.workers[1], &late}) job.resume(*worker);
  job.send(late, wire::OpenStream{.stream = kStream}, layout);
  EXPECT_FALSE(answered(late));
  job.send(zero, wire::Holding{zero.highest()});
  EXPECT_TRUE(ready(late).rejoined);
}

TEST(Registry, PullBuffersAreReadyWhenEverybodyHoldsThem) {
  FoundedJob job{2, small()};
  TestWorker& one = job.workers[1];
  job.workers[0].answers_offers = false;
  job.send(one, wire::NeedPull{kStream});
  EXPECT_TRUE(job.store().pull(one.member, kExtent));
  EXPECT_TRUE(one.got<wire::PullReady>().empty());
  job.send(job.workers[0], wire::Holding{job.workers[0].got<wire::Offer>().back().segment});
  EXPECT_EQ(one.got<wire::PullReady>().size(), 1u);
  job.send(one, wire::NeedPull{kStream});
  EXPECT_EQ(one.got<wire::PullReady>().size(), 2u) << "asked again: they are there";
}

TEST(Registry, ABarrierEndsWhenAllThatCountHaveArrived) {
  FoundedJob job{3, small()};
  const auto arrive = [&](std::size_t rank, std::uint64_t number) {
    job.mail(job.workers[rank], kStream).barrier_arrived = number;
    job.doorbell();
  };
  const auto released = [&](std::size_t rank) {
    return job.mail(job.workers[rank], kStream).barrier_released.load();
  };
  arrive(0, 1);
  arrive(1, 1);
  EXPECT_EQ(released(0), 0u);
  arrive(2, 1);
  for (const std::size_t rank : {0u, 1u, 2u}) EXPECT_EQ(released(rank), 1u);
  EXPECT_EQ(job.control().streams[0].barriers.load(), 1u);
  arrive(0, 2);
  job.send(job.workers[1], wire::CloseStream{kStream});  // closing counts as arrived
  EXPECT_EQ(released(0), 1u);
  job.lose(job.workers[2]);  // so does dying
  EXPECT_EQ(released(0), 2u);
  TestWorker& again = job.attach(2, 3);
  job.run();
  job.open(again, kStream, job.layout);
  EXPECT_EQ(ready(again).barriers, 2u);
  arrive(0, 3);
  EXPECT_EQ(released(0), 2u) << "the one that came back counts again";
  job.mail(again, kStream).barrier_arrived = 3;
  job.doorbell();
  EXPECT_EQ(released(0), 3u);
}

// Regression: a server killed between counting a barrier and releasing its workers left them there.
TEST(Registry, ASuccessorReleasesABarrierThatWasCounted) {
  for (std::uint64_t store = 0; store < 3; ++store) {
    FoundedJob job{2, small()};
    for (TestWorker& worker : job.workers) job.mail(worker, kStream).barrier_arrived = 1;
    job.kill.arm(store);
    EXPECT_THROW(job.doorbell(), psplus::testing::Killed);
    ASSERT_OK(job.take_over());
    for (TestWorker& worker : job.workers) job.resume(worker);
    for (TestWorker& worker : job.workers)
      EXPECT_EQ(job.mail(worker, kStream).barrier_released.load(), 1u) << "store " << store;
    EXPECT_EQ(job.control().streams[0].barriers.load(), 1u);
  }
}

TEST(Registry, AllLeaveABarrierAtOneGateClockWhereverAServerIsKilled) {
  for (std::uint64_t store = 0;; ++store) {
    FoundedJob job{3, small(), {.bound = 5}};
    job.push_whole(2, 1);
    job.push_whole(2, 2);
    job.run();
    for (TestWorker& worker : job.workers) job.mail(worker, kStream).barrier_arrived = 1;
    job.kill.arm(store);
    bool killed = false;
    try {
      job.doorbell();
    } catch (const psplus::testing::Killed&) {
      killed = true;
      ASSERT_OK(job.take_over());
      for (TestWorker& worker : job.workers) job.resume(worker);
    }
    for (const TestWorker& worker : job.workers)
      EXPECT_EQ(gate_clock(job.control(), kStream, worker.member), Step{2}) << "store " << store;
    EXPECT_EQ(job.counters(kStream, job.workers[0]).clock.load(), 0u);
    EXPECT_EQ(job.control().streams[0].barriers.load(), 1u);
    if (!killed) break;
  }
}

TEST(Registry, CloseIsAnsweredWhenThePushesAreInAndIsFinal) {
  FoundedJob job{2, small(), {.mode = Mode::kBsp}};
  TestWorker& one = job.workers[1];
  job.push_whole(1, 1);
  job.send(one, wire::CloseStream{kStream});
  EXPECT_FALSE(job.publish(one, {.flags = store::kPushEmpty}).ok());
  job.run();
  EXPECT_TRUE(one.got<wire::StreamClosed>().empty())
      << "rank 0 has not pushed its part of the step";
  job.push_whole(0, 1);
  job.run();
  EXPECT_EQ(one.got<wire::StreamClosed>().size(), 1u);
  job.expect_values([](std::size_t p, std::size_t i) {
    return initial_value(p, i) - 0.5 * (delta_value(0, 1, p, i) + delta_value(1, 1, p, i));
  });
  job.push_whole(0, 2);  // goes on alone
  job.run();
  EXPECT_EQ(raw(job.workers[0].queues.at(kStream).applied()), 3u);
  const auto layout = job.layout.serialize();
  job.send(one, wire::OpenStream{.stream = kStream, .mode = Mode::kBsp}, layout);
  ASSERT_EQ(one.got<wire::Refused>().size(), 1u);
  EXPECT_THAT(one.got<wire::Refused>()[0].text, HasSubstr("rank 1 has closed stream 0 already"));
  EXPECT_FALSE(one.got<wire::Refused>()[0].fatal);
}

TEST(Registry, NoMemoryRefusesTheRequestAndTheNextOneMayFit) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 1);
  for (const std::size_t later : {0u, 1u, 2u}) {  // the shard; its slots; the blob
    server.source.fail_at = server.source.made() + (later == 2 ? 1 : later);
    const std::size_t before = zero.got<wire::Refused>().size();
    server.open(zero, kStream, small(), {}, bytes_of("blob"));
    ASSERT_EQ(zero.got<wire::Refused>().size(), before + 1) << later;
    EXPECT_EQ(zero.got<wire::Refused>().back().code, StatusCode::kNoSpace);
    EXPECT_FALSE(zero.got<wire::Refused>().back().fatal);
  }
  server.open(zero, kStream, small(), {}, bytes_of("blob"));
  EXPECT_TRUE(ready(zero).provides);
  EXPECT_NE(ready(zero).blob_segment, SegmentId{});
}

}  // namespace
}  // namespace psplus::server
