#include <latch>
#include <vector>

#include <gtest/gtest.h>

#include "collectives/collectives.hpp"
#include "collectives/thread_ranks.hpp"
#include "support/child_process.hpp"

namespace psplus::collectives {
namespace {

using psplus::testing::ChildProcess;
using psplus::testing::FailsWith;
using testing::kNonce;
using testing::patience;
using testing::run_ranks;

constexpr ReduceSpec kSum{Element::float32, Reduction::sum};
constexpr milliseconds kShort{200};

Status sum(Group& group, std::size_t elements, Deadline deadline) {
  std::vector<float> data(elements, 1);
  return all_reduce(group, data.data(), data.data(), elements, kSum, deadline);
}

TEST(Failures, ATimeOutNamesWhoWasWaitedForAndEndsTheGroupForAll) {
  run_ranks(3, [](Group& group) {
    ASSERT_OK(barrier(group, patience()));
    if (group.rank() == Rank{0}) {
      EXPECT_THAT(sum(group, 10, Deadline::after(kShort)),
                  FailsWith(StatusCode::kTimeout, "waiting for rank 2"));
    } else if (group.rank() == Rank{1}) {
      EXPECT_THAT(sum(group, 10, patience()), FailsWith(StatusCode::kTimeout, "rank 2"));
    } else {
      // Comes when the others have given up.
      while (group.status().ok()) std::this_thread::yield();
    }
    EXPECT_THAT(barrier(group, patience()), FailsWith(StatusCode::kTimeout, "rank 0 timed out"));
  });
}

TEST(Failures, RanksOfALargerGroupAreCalledByTheirNumbersThere) {
  run_ranks(2, [](Group& group) {
    group.call_ranks({Rank{4}, Rank{7}});
    if (group.rank() == Rank{0}) {
      EXPECT_THAT(sum(group, 10, Deadline::after(kShort)),
                  FailsWith(StatusCode::kTimeout, "on rank 4: Timed out waiting for rank 7"));
    } else {
      while (group.status().ok()) std::this_thread::yield();
    }
    EXPECT_THAT(barrier(group, patience()),
                FailsWith(StatusCode::kTimeout, "rank 4 timed out waiting for rank 7"));
  });
}

TEST(Failures, AGroupMayEndBecauseOfARankThatIsNotInIt) {
  std::latch both{2};
  run_ranks(2, [&](Group& group) {
    group.call_ranks({Rank{1}, Rank{2}});
    both.arrive_and_wait();
    if (group.rank() == Rank{1}) group.give_up_for_outsider(StatusCode::kPeerLost, Rank{0});
    // Waits in vain, or finds the group ended.
    EXPECT_THAT(sum(group, 10, patience()),
                FailsWith(StatusCode::kPeerLost, "rank 2 found that rank 0 is lost"));
    group.give_up_for_outsider(StatusCode::kTimeout, Rank{5});  // the first reason counts
    EXPECT_THAT(group.status(), FailsWith(StatusCode::kPeerLost, "rank 0 is lost"));
  });
}

TEST(Failures, DifferentCallsAreToldApart) {
  run_ranks(2, [](Group& group) {
    const Status status =
        group.rank() == Rank{0} ? sum(group, 10, patience()) : sum(group, 11, patience());
    // One finds it out; the other may, or hears of it.
    EXPECT_THAT(status, FailsWith(StatusCode::kLayoutMismatch, "called"));
  });
}

TEST(Failures, SizesThatBothEndsDisagreeAboutAreRefused) {
  run_ranks(2, [](Group& group) {
    std::vector<char> data(16);
    const std::vector<const void*> ins(2, data.data());
    const std::vector<void*> outs(2, data.data());
    const std::vector<std::size_t> eight(2, 8);
    const std::vector<std::size_t> four(2, 4);
    if (group.rank() == Rank{0}) {
      (void)all_to_all(group, ins, eight, outs, eight, patience());  // sees nothing wrong
      while (group.status().ok()) std::this_thread::yield();
    } else {
      EXPECT_THAT(all_to_all(group, ins, eight, outs, four, patience()),
                  FailsWith(StatusCode::kLayoutMismatch, "8 bytes to rank 1, which expects 4"));
    }
    EXPECT_THAT(barrier(group, patience()), FailsWith(StatusCode::kLayoutMismatch, ""));
  });
}

TEST(Failures, AnAbortWakesAWaitingRank) {
  run_ranks(2, [](Group& group) {
    if (group.rank() == Rank{0}) {
      EXPECT_THAT(barrier(group, patience()), FailsWith(StatusCode::kClosed, "aborted by rank 1"));
    } else {
      std::this_thread::sleep_for(kShort);  // so that the other one sleeps
      group.abort();
    }
  });
}

TEST(Failures, ARankThatHasLeftIsNotWaitedFor) {
  run_ranks(2, [](Group& group) {
    ASSERT_OK(barrier(group, patience()));
    if (group.rank() == Rank{0}) {
      const auto began = Clock::now();
      EXPECT_THAT(barrier(group, patience()), FailsWith(StatusCode::kPeerLost, "rank 1 (process"));
      EXPECT_LT(Clock::now() - began, std::chrono::seconds{5});
    }
  });
}

Result<std::unique_ptr<Group>> attach(const Segment& segment, Rank rank, std::size_t size) {
  auto fd = segment.fd().duplicate();
  if (!fd.ok()) return fd.status();
  auto mapped = Segment::map(std::move(*fd), 1, Access::kReadWrite);
  if (!mapped.ok()) return mapped.status();
  return Group::attach(std::move(*mapped), rank, size, kNonce);
}

/// What a child reports by its exit code.
constexpr int kSawLoss = 42;

TEST(Failures, AKilledRankIsNamedToTheOthersWithinASecond) {
  auto segment = Group::create_segment(3, kNonce);
  ASSERT_OK(segment);
  const auto child = [&](Rank rank) {
    auto group = attach(*segment, rank, 3);
    if (!group.ok() || !(*group)->connect(patience()).ok()) return 1;
    for (;;) {
      const Status status = sum(**group, 100'000, patience());
      if (status.ok()) continue;
      const bool named = status.message().find("rank 2") != std::string::npos;
      return status.code() == StatusCode::kPeerLost && named ? kSawLoss : 2;
    }
  };
  ChildProcess first{[&] { return child(Rank{0}); }};
  ChildProcess second{[&] { return child(Rank{1}); }};
  ChildProcess victim{[&] { return child(Rank{2}); }};
  auto memory = GroupMemory::open(segment->bytes(), 3, kNonce);
  ASSERT_OK(memory);
  const Deadline soon = patience();
  while (memory->words(0).released.load() < 1000 && !soon.passed()) std::this_thread::yield();
  victim.kill();
  const auto killed = Clock::now();
  EXPECT_EQ(first.exit_code(), kSawLoss);
  EXPECT_EQ(second.exit_code(), kSawLoss);
  EXPECT_LT(Clock::now() - killed, std::chrono::seconds{1});
}

TEST(Failures, ARankThatEndsAfterItsLastCallIsNotMissed) {
  for (int turn = 0; turn < 20; ++turn) {
    auto segment = Group::create_segment(2, kNonce);
    ASSERT_OK(segment);
    const auto child = [&](Rank rank) {
      auto group = attach(*segment, rank, 2);
      if (!group.ok() || !(*group)->connect(patience()).ok()) return 1;
      std::vector<float> data(200'000, 1);
      if (!broadcast(**group, Rank{0}, data.data(), 1000, patience()).ok()) return 2;
      return sum(**group, data.size(), patience()).ok() ? 0 : 3;
    };
    ChildProcess first{[&] { return child(Rank{0}); }};
    ChildProcess second{[&] { return child(Rank{1}); }};
    EXPECT_EQ(first.exit_code(), 0);
    EXPECT_EQ(second.exit_code(), 0);
  }
}

TEST(Failures, AMonitoredBarrierNamesWhoIsMissingAndHarmsNothing) {
  run_ranks(4, [](Group& group) {
    EXPECT_TRUE(monitored_barrier(group, true, patience()).empty());
    if (raw(group.rank()) % 2 == 0) {
      const auto missing = monitored_barrier(group, true, Deadline::after(kShort));
      EXPECT_EQ(missing,
                (group.rank() == Rank{0} ? std::vector{Rank{1}, Rank{3}} : std::vector{Rank{0}}));
    }
    EXPECT_OK(sum(group, 10, patience()));
  });
}

TEST(Failures, MemoryOfAnotherGroupIsRefused) {
  auto segment = Group::create_segment(2, Nonce{7, 7});
  ASSERT_OK(segment);
  EXPECT_THAT(attach(*segment, Rank{0}, 2), FailsWith(StatusCode::kLayoutMismatch, "not this"));
  EXPECT_THAT(attach(*segment, Rank{0}, 3), FailsWith(StatusCode::kLayoutMismatch, "not this"));
}

TEST(Failures, ARankIsTakenOnce) {
  auto segment = Group::create_segment(2, kNonce);
  ASSERT_OK(segment.status());
  const auto attach = [&](Rank rank) {
    auto copy = segment->fd().duplicate();
    EXPECT_OK(copy.status());
    auto mapped = Segment::map(std::move(*copy), GroupMemory::bytes_for(2), Access::kReadWrite);
    EXPECT_OK(mapped.status());
    return Group::attach(std::move(*mapped), rank, 2, kNonce);
  };
  const auto group = attach(Rank{1});
  ASSERT_OK(group.status());
  EXPECT_THAT(attach(Rank{1}).status(), FailsWith(StatusCode::kConfig, "already"));
  (*group)->leave();
  EXPECT_THAT(attach(Rank{1}).status(), FailsWith(StatusCode::kConfig, "already"));
  EXPECT_OK(attach(Rank{0}).status());
}

}  // namespace
}  // namespace psplus::collectives
