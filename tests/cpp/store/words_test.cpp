#include "store/words.hpp"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace psplus::store {
namespace {

TEST(ChunkEntry, HoldsFortyBitsOfBatchAndTwentyFourOfUnit) {
  for (const std::uint64_t batch : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0x123456789a},
                                    ChunkEntry::kMaxBatches - 1})
    for (const std::uint32_t unit : {0u, 1u, 0xabcdefu, 0xffffffu}) {
      const std::uint64_t word = ChunkEntry{BatchId{batch}, UnitIndex{unit}}.pack();
      EXPECT_EQ(word, batch * 0x1000000 + unit);
      EXPECT_EQ(ChunkEntry::unpack(word).batch, BatchId{batch});
      EXPECT_EQ(ChunkEntry::unpack(word).unit, UnitIndex{unit});
    }
  EXPECT_EQ(ChunkEntry::kMaxBatches, std::uint64_t{1} << 40);
}

TEST(PushMark, HoldsSixteenBitsOfIncarnationAndFortySevenOfSequence) {
  constexpr std::uint64_t kLast = (std::uint64_t{1} << 47) - 1;
  for (const std::uint16_t life : {std::uint16_t{0}, std::uint16_t{1}, std::uint16_t{0xffff}})
    for (const std::uint64_t sequence : {std::uint64_t{0}, std::uint64_t{5}, kLast}) {
      const std::uint64_t word = PushMark{Incarnation{life}, Sequence{sequence}}.pack();
      EXPECT_EQ(word & PushMark::kClosed, 0u) << "the top bit is the server's";
      EXPECT_EQ(PushMark::unpack(word).incarnation, Incarnation{life});
      EXPECT_EQ(PushMark::unpack(word).sequence, Sequence{sequence});
      EXPECT_EQ(PushMark::unpack(word | PushMark::kClosed).incarnation, Incarnation{life});
      EXPECT_EQ(PushMark::unpack(word | PushMark::kClosed).sequence, Sequence{sequence});
    }
}

TEST(RecordState, HoldsBatchAndWhetherItIsOpen) {
  for (const bool open : {false, true}) {
    const std::uint64_t word = RecordState{BatchId{77}, open}.pack();
    EXPECT_EQ(word, 154u + (open ? 1 : 0));
    EXPECT_EQ(RecordState::unpack(word).batch, BatchId{77});
    EXPECT_EQ(RecordState::unpack(word).open, open);
  }
}

TEST(Words, DoublesTravelByTheirBits) {
  for (const double value : {0.0, -0.0, 0.1, -3e300, std::numeric_limits<double>::denorm_min(),
                             std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(from_word(to_word(value)), value);
    EXPECT_EQ(std::signbit(from_word(to_word(value))), std::signbit(value));
  }
  EXPECT_TRUE(std::isnan(from_word(to_word(std::nan("")))));
}

}  // namespace
}  // namespace psplus::store
