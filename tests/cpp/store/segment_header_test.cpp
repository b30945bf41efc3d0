#include "store/segment_header.hpp"

#include <set>

#include "support/heap_segments.hpp"
#include "support/status_matchers.hpp"

namespace psplus::store {
namespace {

using psplus::testing::FailsWith;
using psplus::testing::heap_segment;

SegmentHeader& header_of(const SegmentHandle& segment) {
  return *reinterpret_cast<SegmentHeader*>(segment.bytes.data());
}

TEST(SegmentHeader, AWholeOneIsAccepted) {
  const SegmentHandle segment = heap_segment(4096);
  header_of(segment).magic = SegmentHeader::kMagic;
  header_of(segment).size = 4096;
  EXPECT_OK(check_header(segment));
}

TEST(SegmentHeader, WrongMagicSizeOrLengthIsRefused) {
  const SegmentHandle segment = heap_segment(4096);
  const auto wrong = FailsWith(StatusCode::kInternal, "wrong header");
  header_of(segment).size = 4096;
  EXPECT_THAT(check_header(segment), wrong);
  header_of(segment).magic = SegmentHeader::kMagic + 1;  // of another version
  EXPECT_THAT(check_header(segment), wrong);
  header_of(segment).magic = SegmentHeader::kMagic;
  header_of(segment).size = 4095;
  EXPECT_THAT(check_header(segment), wrong);
  header_of(segment).size = 8192;
  EXPECT_THAT(check_header(segment), wrong);

  const SegmentHandle part{.bytes = segment.bytes.first(63), .owner = segment.owner, .fd = -1};
  EXPECT_THAT(check_header(part), FailsWith(StatusCode::kInternal, "shorter than its header"));
  EXPECT_THAT(check_header(SegmentHandle{}), FailsWith(StatusCode::kInternal, "shorter"));
}

TEST(SegmentKind, EveryKindHasAWordOfItsOwn) {
  std::set<std::string_view> words;
  for (std::uint32_t kind = 1; kind <= 6; ++kind)
    words.insert(to_string(static_cast<SegmentKind>(kind)));
  EXPECT_EQ(words.size(), 6u);
  EXPECT_FALSE(words.contains("unknown"));
  EXPECT_EQ(to_string(static_cast<SegmentKind>(7)), "unknown");
}

}  // namespace
}  // namespace psplus::store
