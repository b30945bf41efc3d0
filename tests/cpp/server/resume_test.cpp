// Roster after a take-over: who comes back, who does not, who asks instead.

#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::delta_value;
using psplus::testing::FailsWith;
using psplus::testing::FoundedJob;
using psplus::testing::initial_value;
using psplus::testing::kStream;
using psplus::testing::ServerHarness;
using psplus::testing::TestWorker;
using std::chrono::seconds;
using store::MemberState;
using ::testing::HasSubstr;

store::ExtentLayout small() { return store::ExtentLayout{{{"w", DType::float32, {9}}}, 64}; }

wire::Resume resume_of(const ServerHarness& server, const TestWorker& worker) {
  return {.protocol = wire::kProtocolVersion,
          .job = server.control().header.job,
          .member = worker.member,
          .incarnation = worker.incarnation};
}

TEST(Resume, GoesOnWhereThePredecessorWas) {
  FoundedJob job{2, small()};
  job.push_whole(0, 1);
  ASSERT_OK(job.take_over());
  EXPECT_EQ(job.control().epoch.load(), 1u);
  for (TestWorker& worker : job.workers) {
    worker.inbox.clear();
    job.resume(worker);
    ASSERT_EQ(worker.got<wire::Welcome>().size(), 1u);
    EXPECT_EQ(worker.got<wire::Welcome>()[0].epoch, Epoch{1});
    EXPECT_EQ(worker.got<wire::Welcome>()[0].incarnation, worker.incarnation);
    EXPECT_EQ(worker.got<wire::Attached>().size(), 1u);
    EXPECT_EQ(worker.got<wire::Offer>().size(), job.store().segments().size() - 1);
  }
  job.run();
  job.expect_values([](std::size_t p, std::size_t i) {
    return initial_value(p, i) - 0.5 * delta_value(0, 1, p, i);
  });
  EXPECT_EQ(raw(job.workers[0].queues.at(kStream).applied()), 2u);
}

// Regression: a worker named the highest segment that it held, and was offered those above it only;
// one below was missing, as its offer had reached another worker alone before the server died.
TEST(Resume, OffersASegmentBelowTheHighestThatTheWorkerHolds) {
  FoundedJob job{2, small()};
  ASSERT_OK(job.take_over());
  TestWorker& one = job.workers[1];
  const SegmentId missing = std::prev(one.held.end(), 2)->first;
  ASSERT_NE(missing, one.highest());
  one.held.erase(missing);
  job.resume(one);
  EXPECT_TRUE(one.held.contains(missing));
}

TEST(Resume, WhoDoesNotComeBackInTimeIsExpelled) {
  FoundedJob job{2, small(), {.bound = 0}};
  TestWorker& zero = job.workers[0];
  TestWorker& one = job.workers[1];
  ASSERT_OK(job.take_over());
  job.resume(zero);
  job.push_whole(0, 1);
  job.run();
  EXPECT_EQ(raw(zero.queues.at(kStream).released()), 0u) << "rank 1 counts until it is given up";
  job.tick(seconds{3} - nanoseconds{1});
  EXPECT_EQ(job.state(one), MemberState::kLive);
  job.tick(nanoseconds{1});
  job.run();
  EXPECT_EQ(job.state(one), MemberState::kFree);
  EXPECT_EQ(raw(zero.queues.at(kStream).released()), 1u);
  EXPECT_THAT(job.log.back(), HasSubstr("rank 1 (process 1001) is expelled: it did not come back"));
  EXPECT_EQ(zero.got<wire::Drop>().size(), 2u);
  one.inbox.clear();
  job.resume(one);
  ASSERT_EQ(one.got<wire::Refused>().size(), 1u);
  EXPECT_EQ(one.got<wire::Refused>()[0].code, StatusCode::kClosed);
  EXPECT_TRUE(one.got<wire::Refused>()[0].fatal);
}

TEST(Resume, AJoinerWaitsForThoseWhoHaveNotComeBack) {
  FoundedJob job{3, small()};
  job.lose(job.workers[2]);
  job.run();
  ASSERT_OK(job.take_over());
  job.resume(job.workers[0]);
  TestWorker& joiner = job.attach(2, 3);
  EXPECT_EQ(joiner.got<wire::Welcome>().size(), 1u);
  EXPECT_TRUE(joiner.got<wire::Attached>().empty()) << "rank 1 may not hold its mailbox";
  job.resume(job.workers[1]);
  EXPECT_EQ(joiner.got<wire::Attached>().size(), 1u);
}

TEST(Resume, StrangersAreRefusedAndHarmNobody) {
  FoundedJob job{2, small()};
  const TestWorker zero = job.workers[0];
  ASSERT_OK(job.take_over());
  std::vector<wire::Resume> wrong(5, resume_of(job, zero));
  wrong[0].job += 1;
  wrong[1].incarnation = next(zero.incarnation);
  wrong[2].protocol += 1;
  wrong[3].member = MemberId{100};
  wrong[4].member = job.workers[1].member;
  for (const wire::Resume& message : wrong) {
    TestWorker& stranger = job.connect();
    job.send(stranger, message);
    ASSERT_EQ(stranger.got<wire::Refused>().size(), 1u);
    EXPECT_EQ(stranger.got<wire::Refused>()[0].code, StatusCode::kClosed);
    EXPECT_FALSE(stranger.connected);
  }
  for (const std::size_t rank : {0u, 1u}) {
    job.workers[rank].inbox.clear();
    job.resume(job.workers[rank]);
    EXPECT_EQ(job.workers[rank].got<wire::Attached>().size(), 1u);
  }
}

// Regression: a second Resume made two peers of one member; the end of either drained it.
TEST(Resume, OfAMemberThatIsBackIsRefused) {
  FoundedJob job{2, small()};
  ASSERT_OK(job.take_over());
  job.resume(job.workers[0]);
  TestWorker& twin = job.connect();
  job.send(twin, resume_of(job, job.workers[0]));
  EXPECT_EQ(twin.got<wire::Refused>().size(), 1u);
  job.lose(twin);
  EXPECT_EQ(job.state(job.workers[0]), MemberState::kLive);
  // Nor without a take-over.
  FoundedJob calm{1, small()};
  TestWorker& other = calm.connect();
  calm.send(other, resume_of(calm, calm.workers[0]));
  EXPECT_EQ(other.got<wire::Refused>().size(), 1u);
}

TEST(Resume, TheSameProcessMayAttachAnewAtOnce) {
  FoundedJob job{2, small()};
  ASSERT_OK(job.take_over());
  job.resume(job.workers[0]);
  const TestWorker& again = job.attach(1, 2);  // process 1001, as before
  job.run();
  EXPECT_EQ(again.got<wire::Attached>().size(), 1u);
  EXPECT_EQ(again.member, job.workers[1].member);
  EXPECT_GT(again.incarnation, job.workers[1].incarnation);
}

TEST(Resume, AnotherProcessOfTheRankWaitsUntilItIsDecided) {
  for (const bool comes_back : {true, false}) {
    SCOPED_TRACE(comes_back);
    FoundedJob job{2, small()};
    ASSERT_OK(job.take_over());
    job.resume(job.workers[0]);
    TestWorker& other = job.connect();
    job.send(other, wire::Attach{.rank = Rank{1}, .world_size = 2, .process = 4711});
    EXPECT_TRUE(other.inbox.empty());
    if (comes_back) {
      job.resume(job.workers[1]);
      ASSERT_EQ(other.got<wire::Refused>().size(), 1u);
      EXPECT_THAT(other.got<wire::Refused>()[0].text,
                  HasSubstr("attached already, as process 1001"));
    } else {
      job.tick(seconds{4});
      job.run();
      EXPECT_EQ(other.got<wire::Attached>().size(), 1u);
    }
  }
}

TEST(Resume, AWorkerThatHadNotJoinedIsForgottenAndItsSegmentsAreOfferedToNobody) {
  FoundedJob job{3, small()};
  job.lose(job.workers[2]);
  job.run();
  job.workers[0].answers_offers = false;
  TestWorker& joiner = job.attach(2, 3);
  EXPECT_EQ(job.state(joiner), MemberState::kJoining);
  const SegmentId mailbox = joiner.highest();
  ASSERT_OK(job.take_over());
  EXPECT_EQ(job.state(joiner), MemberState::kFree);
  job.workers[0].answers_offers = true;
  for (const std::size_t rank : {0u, 1u}) {
    job.workers[rank].inbox.clear();
    job.resume(job.workers[rank]);
    for (const wire::Offer& offer : job.workers[rank].got<wire::Offer>())
      EXPECT_NE(offer.segment, mailbox);
  }
  EXPECT_EQ(job.attach(2, 3).got<wire::Attached>().size(), 1u);
}

TEST(Resume, DeadWorkersPushesAreAppliedByTheSuccessor) {
  FoundedJob job{2, small()};
  job.push_whole(1, 1);
  job.lose(job.workers[1]);
  EXPECT_EQ(job.state(job.workers[1]), MemberState::kDraining);
  ASSERT_OK(job.take_over());
  job.resume(job.workers[0]);
  job.run();
  EXPECT_EQ(job.state(job.workers[1]), MemberState::kFree);
  job.expect_values(
      [](std::size_t p, std::size_t i) { return initial_value(p, i) - delta_value(1, 1, p, i); });
}

TEST(Resume, AProviderIsRemindedOfTheValuesThatItOwes) {
  ServerHarness server;
  for (const std::uint32_t rank : {0u, 1u}) server.attach(rank, 2);
  for (TestWorker& worker : server.workers) server.open(worker, kStream, small());
  ASSERT_OK(server.take_over());
  for (TestWorker& worker : server.workers) {
    worker.inbox.clear();
    server.resume(worker);
  }
  ASSERT_EQ(server.workers[0].got<wire::StreamReady>().size(), 1u);
  EXPECT_TRUE(server.workers[0].got<wire::StreamReady>()[0].provides);
  EXPECT_TRUE(server.workers[1].got<wire::StreamReady>().empty());
}

// Regression: with nobody to come back it did not count as having had workers, and stayed.
TEST(Resume, ServerStopsWhenOnlyDeadWorkersPushesWereLeft) {
  FoundedJob job{3, small()};
  job.lose(job.workers[2]);
  job.run();
  TestWorker& joiner = job.connect();
  joiner.answers_offers = false;  // holds the segments, but counts nowhere yet
  job.send(joiner, wire::Attach{.rank = Rank{2}, .world_size = 3, .process = 77});
  job.push_whole(0, 1);
  job.lose(job.workers[0]);
  job.lose(job.workers[1]);
  ASSERT_EQ(job.state(joiner), MemberState::kJoining);
  ASSERT_EQ(job.state(job.workers[0]), MemberState::kDraining);
  ASSERT_OK(job.take_over());
  job.run();
  EXPECT_TRUE(job.stopped);
}

TEST(Resume, ServerStopsWhenNobodyComesBack) {
  FoundedJob job{2, small()};
  ASSERT_OK(job.take_over());
  job.run();
  EXPECT_FALSE(job.stopped);
  job.tick(seconds{4});
  job.run();
  EXPECT_TRUE(job.stopped);
}

}  // namespace
}  // namespace psplus::server
