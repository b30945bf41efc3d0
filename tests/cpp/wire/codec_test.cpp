#include "wire/codec.hpp"

#include <string>

#include <gtest/gtest.h>

#include "base/ids.hpp"

namespace psplus::wire {
namespace {

TEST(Writer, WritesLittleEndian) {
  Writer writer;
  writer.put(std::uint32_t{0x01020304});
  writer.put(StreamId{0x0506});
  writer.put_string("ab");
  const std::vector<std::byte> expected{std::byte{4}, std::byte{3}, std::byte{2},   std::byte{1},
                                        std::byte{6}, std::byte{5}, std::byte{2},   std::byte{0},
                                        std::byte{0}, std::byte{0}, std::byte{'a'}, std::byte{'b'}};
  EXPECT_EQ(writer.take(), expected);
}

TEST(Reader, ReadsBackWhatWasWritten) {
  Writer writer;
  writer.put(std::uint8_t{0xfe});
  writer.put(std::int64_t{-3});
  writer.put(0.1);
  writer.put_string("");
  writer.put_string(std::string("a\0b", 3));
  writer.put(Rank{77});
  const auto bytes = writer.take();
  Reader reader{bytes};
  EXPECT_EQ(reader.get<std::uint8_t>(), 0xfe);
  EXPECT_EQ(reader.get<std::int64_t>(), -3);
  EXPECT_EQ(reader.get<double>(), 0.1);
  EXPECT_EQ(reader.get_string(), "");
  EXPECT_EQ(reader.get_string(), std::string("a\0b", 3));
  EXPECT_FALSE(reader.finished());
  EXPECT_EQ(reader.get<Rank>(), Rank{77});
  EXPECT_TRUE(reader.finished());
}

TEST(Reader, PastTheEndYieldsZerosAndFailsForGood) {
  const std::byte bytes[] = {std::byte{9}, std::byte{9}, std::byte{9}};
  Reader reader{bytes};
  EXPECT_EQ(reader.get<std::uint32_t>(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.get<std::uint8_t>(), 0u) << "a failed reader yields nothing, even what is there";
  EXPECT_FALSE(reader.ok());
  EXPECT_FALSE(reader.finished());
}

TEST(Reader, AStringLongerThanTheRestIsNotAllocated) {
  Writer writer;
  writer.put(std::uint32_t{0xffffffff});
  writer.put(std::uint8_t{1});
  const auto bytes = writer.take();
  Reader reader{bytes};
  EXPECT_EQ(reader.get_string(), "");
  EXPECT_FALSE(reader.ok());
}

TEST(Reader, CanHoldCountsWholeItems) {
  const std::vector<std::byte> bytes(12);
  EXPECT_TRUE(Reader{bytes}.can_hold(3, 4));
  EXPECT_TRUE(Reader{bytes}.can_hold(0, 4));
  EXPECT_FALSE(Reader{bytes}.can_hold(4, 4));
  EXPECT_FALSE(Reader{bytes}.can_hold(~std::uint64_t{0}, 8)) << "count * size would overflow";
  Reader reader{bytes};
  EXPECT_FALSE(reader.can_hold(13, 1));
  EXPECT_FALSE(reader.ok());
}

TEST(Reader, EmptyBufferIsFinished) { EXPECT_TRUE(Reader{{}}.finished()); }

}  // namespace
}  // namespace psplus::wire
