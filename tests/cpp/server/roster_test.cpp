#include "server/roster.hpp"

#include <algorithm>

#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::delta_value;
using psplus::testing::FoundedJob;
using psplus::testing::initial_value;
using psplus::testing::kStream;
using psplus::testing::ServerHarness;
using psplus::testing::TestWorker;
using store::MemberState;
using ::testing::HasSubstr;

store::ExtentLayout small() { return store::ExtentLayout{{{"w", DType::float32, {9}}}, 64}; }

/// The one refusal that a worker got, as a Status.
Status refusal(const TestWorker& worker, bool fatal = true) {
  const auto refused = worker.got<wire::Refused>();
  EXPECT_EQ(refused.size(), 1u);
  if (refused.empty()) return {};
  EXPECT_EQ(refused[0].fatal, fatal);
  EXPECT_EQ(worker.connected, !fatal);
  return {refused[0].code, refused[0].text};
}
MATCHER_P2(Refuses, code, text, "") {
  *result_listener << arg.message();
  return arg.code() == code && arg.message().find(text) != std::string::npos;
}

TEST(Roster, AttachWelcomesOffersAndCommits) {
  ServerHarness server;
  TestWorker& one = server.attach(1, 2);
  ASSERT_EQ(one.inbox.size(), 3u);
  const auto* const welcome = std::get_if<wire::Welcome>(&one.inbox[0]);
  ASSERT_NE(welcome, nullptr);
  EXPECT_EQ(welcome->job, server.control().header.job);
  EXPECT_EQ(welcome->epoch, Epoch{0});
  EXPECT_TRUE(std::holds_alternative<wire::Offer>(one.inbox[1]));
  EXPECT_TRUE(std::holds_alternative<wire::Attached>(one.inbox[2]));
  EXPECT_EQ(server.state(one), MemberState::kLive);
  const store::MemberEntry& entry = server.control().members[index(one.member)];
  EXPECT_EQ(entry.rank.load(), 1u);
  EXPECT_EQ(entry.process.load(), 1001u);
  EXPECT_EQ(entry.incarnation.load(), raw(one.incarnation));
  EXPECT_EQ(server.control().world_size.load(), 2u);

  const TestWorker& zero = server.attach(0, 2);
  EXPECT_NE(zero.member, one.member);
  EXPECT_GT(zero.incarnation, one.incarnation);
  EXPECT_EQ(zero.held.size(), 3u) << "control and both mailboxes";
  EXPECT_EQ(one.held.size(), 3u);
}

TEST(Roster, ANewWorkerIsOfferedEverySegmentInAscendingOrder) {
  FoundedJob job{2, small()};
  job.lose(job.workers[1]);
  job.run();
  const TestWorker& again = job.attach(1, 2);
  std::vector<SegmentId> offered;
  for (const auto& offer : again.got<wire::Offer>()) offered.push_back(offer.segment);
  EXPECT_TRUE(std::is_sorted(offered.begin(), offered.end()));
  EXPECT_EQ(again.held.size(), job.store().segments().size());
}

TEST(Roster, AServerTakesAsManyWorkersAsItHasPlaces) {
  ServerHarness server;
  constexpr auto kPlaces = static_cast<std::uint32_t>(store::kMaxMembers);
  for (std::uint32_t rank = 0; rank < kPlaces; ++rank)
    ASSERT_EQ(server.state(server.attach(rank, kPlaces + 1)), MemberState::kLive) << rank;
  TestWorker& surplus = server.attach(kPlaces, kPlaces + 1);
  EXPECT_THAT(refusal(surplus), Refuses(StatusCode::kNoSpace,
                                        "a server takes 256 workers at most; set PSPLUS_HOST_ID"));
  // A place that is given up can be taken.
  server.lose(server.workers[7]);
  server.run();
  EXPECT_EQ(server.state(server.attach(7, kPlaces + 1)), MemberState::kLive);
}

TEST(Roster, ASecondWorkerOfARankIsRefusedWithTheFirstOnesProcess) {
  ServerHarness server;
  TestWorker& first = server.attach(0, 2);
  TestWorker& second = server.attach(0, 2);
  EXPECT_THAT(refusal(second),
              Refuses(StatusCode::kConfig, "rank 0 is attached already, as process 1000"));
  EXPECT_EQ(server.state(first), MemberState::kLive);
  EXPECT_TRUE(first.connected);
  server.lose(second);  // its connection's end is nobody's death
  EXPECT_EQ(server.state(first), MemberState::kLive);
}

TEST(Roster, WorldSizesAndRanksMustFit) {
  ServerHarness server;
  EXPECT_THAT(refusal(server.attach(2, 2)),
              Refuses(StatusCode::kConfig, "rank 2 is not below WORLD_SIZE 2"));
  EXPECT_THAT(refusal(server.attach(0, 0)), Refuses(StatusCode::kConfig, "not below WORLD_SIZE 0"));
  EXPECT_EQ(server.control().world_size.load(), 0u) << "a refused worker does not set it";
  const TestWorker& first = server.attach(0, 3);
  EXPECT_EQ(server.state(first), MemberState::kLive);
  EXPECT_THAT(
      refusal(server.attach(1, 2)),
      Refuses(StatusCode::kConfig, "rank 1 says WORLD_SIZE is 2, but this job was started with 3"));
  EXPECT_THAT(refusal(server.attach(1, 2)), Refuses(StatusCode::kConfig, "PSPLUS_JOB"));
}

TEST(Roster, AnotherProtocolIsRefusedWithBothNumbers) {
  ServerHarness server;
  TestWorker& worker = server.connect();
  server.send(worker, wire::Attach{.protocol = 7, .rank = Rank{0}, .world_size = 1, .process = 5});
  EXPECT_THAT(refusal(worker),
              Refuses(StatusCode::kConfig, "speaks protocol 7, the job's server 3"));
}

TEST(Roster, AttachIsAnsweredOnlyWhenEveryLiveWorkerHoldsTheMailbox) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  zero.answers_offers = false;
  const TestWorker& one = server.attach(1, 2);
  EXPECT_TRUE(one.got<wire::Attached>().empty());
  EXPECT_EQ(server.state(one), MemberState::kJoining);
  const SegmentId mailbox = zero.got<wire::Offer>().back().segment;
  server.send(zero, wire::Holding{SegmentId{raw(mailbox) - 1}});
  EXPECT_EQ(server.state(one), MemberState::kJoining);
  server.send(zero, wire::Holding{mailbox});
  EXPECT_EQ(one.got<wire::Attached>().size(), 1u);
  EXPECT_EQ(server.state(one), MemberState::kLive);
}

TEST(Roster, ADeadWorkerIsNotWaitedFor) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  zero.answers_offers = false;
  const TestWorker& one = server.attach(1, 2);
  server.lose(zero);
  EXPECT_EQ(one.got<wire::Attached>().size(), 1u);
  EXPECT_EQ(server.state(one), MemberState::kLive);
}

TEST(Roster, AJoinerThatDiesNeverWas) {
  ServerHarness server;
  TestWorker& zero = server.attach(0, 2);
  zero.answers_offers = false;
  TestWorker& one = server.attach(1, 2);
  const SegmentId mailbox = zero.got<wire::Offer>().back().segment;
  server.lose(one);
  EXPECT_EQ(server.state(one), MemberState::kFree);
  ASSERT_EQ(zero.got<wire::Drop>().size(), 1u);
  EXPECT_EQ(zero.got<wire::Drop>()[0].segment, mailbox);
  EXPECT_FALSE(server.store().segments().contains(mailbox));
  zero.answers_offers = true;
  const TestWorker& again = server.attach(1, 2);
  EXPECT_EQ(server.state(again), MemberState::kLive);
  EXPECT_EQ(again.member, one.member);
}

TEST(Roster, ARestartedRankGetsItsPlaceBackUnderANewLife) {
  ServerHarness server;
  server.attach(0, 3);
  TestWorker& one = server.attach(1, 3);
  TestWorker& two = server.attach(2, 3);
  server.lose(one);
  server.lose(two);
  server.run();
  const TestWorker& two_again = server.attach(2, 3);
  const TestWorker& one_again = server.attach(1, 3);
  EXPECT_EQ(two_again.member, two.member);
  EXPECT_EQ(one_again.member, one.member);
  EXPECT_GT(two_again.incarnation, two.incarnation);
  EXPECT_GT(one_again.incarnation, two_again.incarnation);
}

TEST(Roster, DeathAppliesWhatWasPublishedAndThenAdmitsTheNextLife) {
  FoundedJob job{2, small()};
  TestWorker& one = job.workers[1];
  job.push_whole(1, 1);
  job.lose(one);
  EXPECT_EQ(job.state(one), MemberState::kDraining);
  EXPECT_TRUE(one.queues.at(kStream).closed());
  EXPECT_THAT(job.publish(one, {}), Refuses(StatusCode::kClosed, "the push did not happen"));
  EXPECT_THAT(job.log.back(), HasSubstr("rank 1 (process 1001) is gone"));
  const TestWorker& again = job.attach(1, 2);
  EXPECT_TRUE(again.inbox.empty()) << "its former life is still draining";
  const auto held_before = job.workers[0].held.size();
  job.run();
  EXPECT_EQ(again.got<wire::Attached>().size(), 1u);
  EXPECT_EQ(again.member, one.member);
  EXPECT_EQ(job.workers[0].got<wire::Drop>().size(), 2u) << "mailbox and slots of the former life";
  EXPECT_EQ(job.workers[0].held.size(), held_before - 2 + 1);
  // One worker was left when it was applied.
  job.expect_values(
      [](std::size_t p, std::size_t i) { return initial_value(p, i) - delta_value(1, 1, p, i); });
}

TEST(Roster, OfSeveralThatWaitForAPlaceTheFirstGetsIt) {
  FoundedJob job{2, small()};
  job.push_whole(1, 1);
  job.lose(job.workers[1]);
  TestWorker& gone = job.attach(1, 2);
  TestWorker& first = job.attach(1, 2);
  TestWorker& second = job.attach(1, 2);
  job.lose(gone);
  job.run();
  EXPECT_TRUE(gone.inbox.empty());
  EXPECT_EQ(first.got<wire::Attached>().size(), 1u);
  EXPECT_THAT(refusal(second), Refuses(StatusCode::kConfig, "rank 1 is attached already"));
}

TEST(Roster, AHeartbeatIsASignOfLife) {
  ServerHarness server;
  TestWorker& worker = server.attach(0, 1);
  const auto& sign = server.control().members[index(worker.member)].last_sign_of_life;
  const std::int64_t attached = sign.load();
  server.tick(std::chrono::seconds{5});
  EXPECT_EQ(sign.load(), attached) << "a frozen process does not beat";
  server.store().mailbox(worker.member).heartbeat.fetch_add(1);
  server.tick(std::chrono::seconds{5});
  const std::int64_t beaten = to_nanoseconds(server.now);
  EXPECT_EQ(sign.load(), beaten);
  server.tick(std::chrono::seconds{5});
  EXPECT_EQ(sign.load(), beaten);
}

TEST(Roster, DetachIsAnsweredWhenThePushesAreIn) {
  FoundedJob job{2, small()};
  TestWorker& one = job.workers[1];
  job.push_whole(1, 1);
  job.push_whole(1, 2);
  job.send(one, wire::Detach{});
  EXPECT_TRUE(one.got<wire::Detached>().empty());
  EXPECT_EQ(job.state(one), MemberState::kDraining);
  job.run();
  EXPECT_EQ(one.got<wire::Detached>().size(), 1u);
  EXPECT_FALSE(one.connected);
  EXPECT_EQ(job.state(one), MemberState::kFree);
  EXPECT_EQ(job.counters(kStream, one).pushes.load(), 2u);
  EXPECT_TRUE(one.got<wire::Drop>().empty());
  EXPECT_EQ(job.workers[0].got<wire::Drop>().size(), 2u);
  EXPECT_FALSE(job.stopped);
}

TEST(Roster, DetachBeforeTheAttachWasAnsweredIsAnsweredAtOnce) {
  ServerHarness server;
  server.attach(0, 2).answers_offers = false;
  TestWorker& one = server.attach(1, 2);
  server.send(one, wire::Detach{});
  EXPECT_EQ(one.got<wire::Detached>().size(), 1u);
  EXPECT_FALSE(one.connected);
  EXPECT_EQ(server.state(one), MemberState::kFree);
}

TEST(Roster, AWorkerThatDiesWhileItDetachesIsFreedAllTheSame) {
  FoundedJob job{2, small()};
  TestWorker& one = job.workers[1];
  job.push_whole(1, 1);
  job.send(one, wire::Detach{});
  job.lose(one);
  job.run();
  EXPECT_EQ(job.state(one), MemberState::kFree);
  EXPECT_EQ(job.counters(kStream, one).pushes.load(), 1u);
}

// Regression: the second Attach overwrote the first one, whose member then lived for ever.
TEST(Roster, AttachingTwiceOnOneConnectionExpels) {
  FoundedJob job{3, small()};
  TestWorker& two = job.workers[2];
  job.send(two, wire::Attach{.rank = Rank{2}, .world_size = 3, .process = 1});
  EXPECT_THAT(refusal(two), Refuses(StatusCode::kClosed, "attached twice"));
  job.run();
  EXPECT_EQ(job.state(two), MemberState::kFree);
  EXPECT_EQ(job.state(job.workers[0]), MemberState::kLive);
  EXPECT_EQ(job.attach(2, 3).got<wire::Attached>().size(), 1u);
}

TEST(Roster, AttachingTwiceWhileWaitingIsRefused) {
  FoundedJob job{2, small()};
  job.push_whole(1, 1);
  job.lose(job.workers[1]);
  TestWorker& waiting = job.attach(1, 2);
  job.send(waiting, wire::Attach{.rank = Rank{1}, .world_size = 2, .process = 1});
  EXPECT_THAT(refusal(waiting), Refuses(StatusCode::kInternal, "attached twice"));
  job.run();
  EXPECT_EQ(job.state(job.workers[1]), MemberState::kFree);
}

TEST(Roster, TheTableIsFullAt256) {
  ServerHarness server;
  for (std::uint32_t rank = 0; rank < 256; ++rank)
    ASSERT_EQ(server.attach(rank, 300).got<wire::Attached>().size(), 1u) << rank;
  EXPECT_THAT(refusal(server.attach(256, 300)),
              Refuses(StatusCode::kNoSpace, "256 workers at most; set PSPLUS_HOST_ID"));
  server.lose(server.workers[77]);
  server.run();
  const TestWorker& after = server.attach(256, 300);
  EXPECT_EQ(after.got<wire::Attached>().size(), 1u) << "any free place does";
  EXPECT_EQ(after.member, server.workers[77].member);
}

TEST(Roster, NoMemoryForAMailboxIsToldAndHarmsNobody) {
  ServerHarness server;
  const TestWorker& zero = server.attach(0, 2);
  server.source.fail_at = server.source.made();
  EXPECT_THAT(refusal(server.attach(1, 2)), Refuses(StatusCode::kNoSpace, "no memory"));
  EXPECT_EQ(server.state(zero), MemberState::kLive);
  EXPECT_EQ(server.attach(1, 2).got<wire::Attached>().size(), 1u);
}

TEST(Roster, TheServerStopsWithItsLastWorkerAndNotBeforeItsPushesAreIn) {
  FoundedJob job{2, small()};
  job.push_whole(0, 1);
  job.push_whole(1, 1);
  job.send(job.workers[0], wire::Detach{});
  job.lose(job.workers[1]);
  EXPECT_FALSE(job.stopped);
  job.run();
  EXPECT_TRUE(job.stopped);
  EXPECT_EQ(job.control().streams[0].total_pushes.load(), 2u);
  EXPECT_EQ(job.workers[0].got<wire::Detached>().size(), 1u);
}

}  // namespace
}  // namespace psplus::server
