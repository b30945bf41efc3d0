#include "server/gate.hpp"

#include <memory>

#include <gtest/gtest.h>

namespace psplus::server {
namespace {

using store::MemberState;
using store::Mode;
using store::StreamMemberState;

constexpr StreamId kStream{2};

class GateTest : public ::testing::Test {
 protected:
  void member(std::uint16_t m, MemberState state, StreamMemberState in_stream,
              std::uint64_t clock = 0, bool founder = false) {
    control_->members[m].state = raw(state);
    control_->members[m].founder = founder ? 1 : 0;
    control_->streams[index(kStream)].members[m].state = raw(in_stream);
    control_->streams[index(kStream)].members[m].clock = clock;
  }
  void live(std::uint16_t m, std::uint64_t clock) {
    member(m, MemberState::kLive, StreamMemberState::kRegistered, clock);
  }
  void come_to_barrier(std::uint16_t m, std::uint32_t number) {
    control_->streams[index(kStream)].members[m].barrier_arrived = number;
  }
  void scheme(Mode mode, std::uint64_t bound) {
    control_->streams[index(kStream)].mode = raw(mode);
    control_->streams[index(kStream)].bound = bound;
  }
  [[nodiscard]] std::uint64_t released(std::uint16_t m) const {
    return raw(released_step(*control_, kStream, MemberId{m}));
  }
  std::unique_ptr<store::ControlBlock> control_ = std::make_unique<store::ControlBlock>();
};

TEST_F(GateTest, OnlyLiveRegisteredMembersAndFoundersAreActive) {
  struct Row {
    MemberState state;
    StreamMemberState in_stream;
    bool founder, active;
  };
  const Row rows[] = {
      {MemberState::kLive, StreamMemberState::kRegistered, false, true},
      {MemberState::kLive, StreamMemberState::kRegistered, true, true},
      {MemberState::kLive, StreamMemberState::kAbsent, false, false},
      {MemberState::kLive, StreamMemberState::kAbsent, true, true},
      {MemberState::kLive, StreamMemberState::kLeft, false, false},
      {MemberState::kLive, StreamMemberState::kLeft, true, false},
      {MemberState::kFree, StreamMemberState::kRegistered, true, false},
      {MemberState::kJoining, StreamMemberState::kRegistered, true, false},
      {MemberState::kDraining, StreamMemberState::kRegistered, true, false},
  };
  std::uint32_t active = 0;
  for (std::uint16_t m = 0; m < std::size(rows); ++m) {
    member(m, rows[m].state, rows[m].in_stream, 0, rows[m].founder);
    EXPECT_EQ(is_active(*control_, kStream, MemberId{m}), rows[m].active) << "row " << m;
    active += rows[m].active ? 1 : 0;
    EXPECT_EQ(active_count(*control_, kStream), active);
  }
}

TEST_F(GateTest, TheLeastGateClockIsTheSlowestActiveMembers) {
  EXPECT_EQ(least_gate_clock(*control_, kStream, Step{17}), Step{17}) << "nobody is active";
  live(4, 9);
  EXPECT_EQ(least_gate_clock(*control_, kStream, Step{1}), Step{9});
  live(200, 6);
  EXPECT_EQ(least_gate_clock(*control_, kStream, Step{1}), Step{6});
  member(5, MemberState::kDraining, StreamMemberState::kRegistered, 2);
  member(6, MemberState::kLive, StreamMemberState::kLeft, 3);
  EXPECT_EQ(least_gate_clock(*control_, kStream, Step{1}), Step{6})
      << "the dead and the closed do not count";
  member(7, MemberState::kLive, StreamMemberState::kAbsent, 0, true);
  EXPECT_EQ(least_gate_clock(*control_, kStream, Step{1}), Step{0}) << "a founder surely comes";
}

TEST_F(GateTest, BoundedStalenessByHand) {
  live(0, 3);
  live(1, 1);
  live(2, 2);
  struct Row {
    std::uint64_t bound, released[3];
  };
  const Row rows[] = {
      {0, {1, 1, 1}}, {1, {2, 1, 2}}, {2, {3, 1, 2}}, {3, {3, 1, 2}}, {store::kNoBound, {3, 1, 2}}};
  for (const Row& row : rows) {
    scheme(Mode::kAsync, row.bound);
    for (std::uint16_t m = 0; m < 3; ++m)
      EXPECT_EQ(released(m), row.released[m]) << "bound " << row.bound << ", member " << m;
  }
}

TEST_F(GateTest, AHugeBoundDoesNotWrapAround) {
  scheme(Mode::kAsync, store::kNoBound - 1);
  live(0, 9);
  live(1, 5);
  EXPECT_EQ(released(0), 9u);
  EXPECT_EQ(released(1), 5u);
}

TEST_F(GateTest, ADeadSlowWorkerOpensTheGate) {
  scheme(Mode::kAsync, 1);
  live(0, 10);
  live(1, 4);
  EXPECT_EQ(released(0), 5u);
  member(1, MemberState::kDraining, StreamMemberState::kRegistered, 4);
  EXPECT_EQ(released(0), 10u);
}

TEST_F(GateTest, BspReleasesWhatIsApplied) {
  scheme(Mode::kBsp, 0);
  live(0, 7);
  live(1, 6);
  EXPECT_EQ(released(0), 7u);
  EXPECT_EQ(released(1), 6u);
}

TEST_F(GateTest, NobodyWaitsForWhoStandsAtTheBarrier) {
  scheme(Mode::kAsync, 2);
  live(0, 3);
  live(1, 9);
  EXPECT_EQ(released(1), 5u);
  come_to_barrier(0, 1);
  EXPECT_TRUE(stands_at_barrier(*control_, kStream, MemberId{0}));
  EXPECT_FALSE(stands_at_barrier(*control_, kStream, MemberId{1}));
  EXPECT_EQ(released(1), 9u);
  EXPECT_EQ(released(0), 3u);
  come_to_barrier(1, 1);
  EXPECT_EQ(least_gate_clock(*control_, kStream, Step{17}), Step{17}) << "nobody can step";
  control_->streams[index(kStream)].barriers = 1;
  EXPECT_FALSE(stands_at_barrier(*control_, kStream, MemberId{0})) << "it has passed";
  EXPECT_EQ(released(1), 5u);
}

TEST_F(GateTest, TheCountOfBarriersMayWrapAround) {
  live(0, 3);
  control_->streams[index(kStream)].barriers = 0xffff'ffff;
  come_to_barrier(0, 0xffff'ffff);
  EXPECT_FALSE(stands_at_barrier(*control_, kStream, MemberId{0}));
  come_to_barrier(0, 0);  // the low half of 2^32
  EXPECT_TRUE(stands_at_barrier(*control_, kStream, MemberId{0}));
}

TEST_F(GateTest, CreditCountsForGatesAndNotForSteps) {
  scheme(Mode::kAsync, 1);
  live(0, 3);
  live(1, 10);
  control_->streams[index(kStream)].members[0].credit = 5;
  EXPECT_EQ(gate_clock(*control_, kStream, MemberId{0}), Step{8});
  EXPECT_EQ(least_gate_clock(*control_, kStream, Step{0}), Step{8});
  EXPECT_EQ(greatest_gate_clock(*control_, kStream), Step{10});
  EXPECT_EQ(released(1), 9u);
  control_->streams[index(kStream)].members[0].credit = 9;
  EXPECT_EQ(released(1), 10u);
  EXPECT_EQ(released(0), 2u) << "its third step is two ahead of the other's tenth";
}

TEST_F(GateTest, AJoinerEntersWhereNobodyIsTooFarAheadOfIt) {
  EXPECT_EQ(joining_clock(*control_, kStream, Step{4}), Step{4}) << "it is alone";
  live(0, 3);
  live(1, 9);
  EXPECT_EQ(joining_clock(*control_, kStream, Step{4}), Step{3});
  control_->streams[index(kStream)].members[0].credit = 2;
  EXPECT_EQ(joining_clock(*control_, kStream, Step{4}), Step{5});
  come_to_barrier(0, 1);
  EXPECT_EQ(joining_clock(*control_, kStream, Step{4}), Step{9}) << "only one can step";
  come_to_barrier(1, 1);
  EXPECT_EQ(joining_clock(*control_, kStream, Step{4}), Step{9}) << "none can step";
}

}  // namespace
}  // namespace psplus::server
