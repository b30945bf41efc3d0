#include "base/clock.hpp"

#include <gtest/gtest.h>

namespace psplus {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

TEST(Clock, NanosecondsGoThereAndBack) {
  for (const std::int64_t ns : {std::int64_t{0}, std::int64_t{1}, std::int64_t{999'999'999},
                                std::int64_t{1'000'000'001}, std::int64_t{1} << 60})
    EXPECT_EQ(to_nanoseconds(from_nanoseconds(ns)), ns);
}

TEST(Deadline, AbsurdDurationsSaturate) {
  EXPECT_EQ(Deadline::after(nanoseconds::max()).at(), TimePoint::max());
  EXPECT_FALSE(Deadline::after(nanoseconds::max()).passed());
  EXPECT_GT(Deadline::after(nanoseconds::max()).left(), hours{24 * 365});
}

TEST(Deadline, PassedLeavesNothing) {
  const Deadline past = Deadline::after(seconds{-5});
  EXPECT_TRUE(past.passed());
  EXPECT_EQ(past.left(), nanoseconds{0});
  EXPECT_TRUE(Deadline::after(nanoseconds{0}).passed());
}

TEST(Deadline, LeftIsWithinWhatWasAskedFor) {
  const Deadline deadline = Deadline::after(seconds{1000});
  EXPECT_FALSE(deadline.passed());
  EXPECT_LE(deadline.left(), seconds{1000});
  EXPECT_GT(deadline.left(), seconds{900});
}

TEST(Deadline, AtMostTakesTheEarlier) {
  const Deadline near = Deadline::after(seconds{10});
  EXPECT_EQ(near.at_most(seconds{1000}).at(), near.at());
  const Deadline far = Deadline::after(seconds{1000});
  EXPECT_LE(far.at_most(seconds{10}).left(), seconds{10});
  EXPECT_EQ(far.at_most(nanoseconds::max()).at(), far.at());
}

}  // namespace
}  // namespace psplus
