#include "worker/step_vector.hpp"

#include <memory>

#include <gtest/gtest.h>

namespace psplus::worker {
namespace {

TEST(StepVector, LoadsCountersOfOneStreamByPlace) {
  const auto control = std::make_unique<store::ControlBlock>();
  for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
    control->streams[3].members[m].clock = 1000 + m;
    control->streams[3].members[m].pushes = 2000 + m;
    control->streams[2].members[m].clock = 7;
  }
  const StepVector vector = load_step_vector(*control, StreamId{3});
  ASSERT_EQ(vector.clock.size(), store::kMaxMembers);
  ASSERT_EQ(vector.pushes.size(), store::kMaxMembers);
  for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
    EXPECT_EQ(vector.clock[m], 1000 + m);
    EXPECT_EQ(vector.pushes[m], 2000 + m);
  }
}

TEST(StepVector, ForeignLeavesOutOnesOwn) {
  const auto control = std::make_unique<store::ControlBlock>();
  control->streams[0].members[0].pushes = 5;
  control->streams[0].members[9].pushes = 11;
  control->streams[0].members[255].pushes = 23;
  const StepVector vector = load_step_vector(*control, StreamId{0});
  EXPECT_EQ(vector.foreign(MemberId{0}), 34u);
  EXPECT_EQ(vector.foreign(MemberId{9}), 28u);
  EXPECT_EQ(vector.foreign(MemberId{255}), 16u);
  EXPECT_EQ(vector.foreign(MemberId{1}), 39u);
}

TEST(StepVector, OfACutIsWhatTheServerWroteThere) {
  const auto cut = std::make_unique<store::PullHeader::Cut>();
  cut->clock[4] = 9;
  cut->pushes[4] = 12;
  cut->pushes[255] = 1;
  const StepVector vector = load_step_vector(*cut);
  EXPECT_EQ(vector.clock[4], 9u);
  EXPECT_EQ(vector.pushes[4], 12u);
  EXPECT_EQ(vector.foreign(MemberId{4}), 1u);
}

}  // namespace
}  // namespace psplus::worker
