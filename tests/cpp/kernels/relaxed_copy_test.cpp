#include "kernels/relaxed_copy.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "guarded_buffer.hpp"

namespace psplus::kernels {
namespace {

using testing::GuardedBuffer;

// Sizes in 4-byte scalars: none, a half word, words, the neighbours of an 8-word block, a chunk.
const std::vector<std::size_t> kScalars = {0,  1,  2,  3,  4,  5,  7,  8,     9,     14,
                                           15, 16, 17, 18, 31, 32, 33, 16383, 16384, 16385};

/// The parameter is the offset of the private side.
class RelaxedCopy : public ::testing::TestWithParam<std::size_t> {
 protected:
  static std::uint32_t value_at(std::size_t i) { return static_cast<std::uint32_t>(i * 7 + 1); }
};

TEST_P(RelaxedCopy, ReadsAndWritesExactlyTheBytesAsked) {
  for (const std::size_t n : kScalars) {
    SCOPED_TRACE(n);
    GuardedBuffer<std::uint32_t> plain(n, GetParam()), shared(n), back(n, GetParam());
    for (std::size_t i = 0; i < n; ++i) plain.span()[i] = value_at(i);
    store_words_relaxed(plain.data(), shared.data(), plain.size_bytes());
    for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(shared.span()[i], value_at(i)) << i;
    EXPECT_TRUE(shared.guards_intact());

    copy_words_relaxed(shared.data(), back.data(), shared.size_bytes());
    for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(back.span()[i], value_at(i)) << i;
    EXPECT_TRUE(back.guards_intact());
  }
}

TEST_P(RelaxedCopy, ThePrivateSideNeedsNoAlignment) {
  for (const std::size_t n : kScalars) {
    SCOPED_TRACE(n);
    GuardedBuffer<std::uint32_t> shared(n), again(n);
    GuardedBuffer<std::byte> bytes(n * 4, 2 * GetParam() + 1);
    for (std::size_t i = 0; i < n; ++i) shared.span()[i] = value_at(i);
    copy_words_relaxed(shared.data(), bytes.data(), shared.size_bytes());
    ASSERT_EQ(std::memcmp(bytes.data(), shared.data(), shared.size_bytes()), 0);
    EXPECT_TRUE(bytes.guards_intact());

    store_words_relaxed(bytes.data(), again.data(), again.size_bytes());
    for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(again.span()[i], value_at(i)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Offsets, RelaxedCopy, ::testing::Values(0, 1, 3),
                         ::testing::PrintToStringParamName());

/// A word whose halves belong together: a torn read shows.
std::uint64_t word_of(std::uint32_t round, std::size_t index) {
  const std::uint32_t low = round * 31 + static_cast<std::uint32_t>(index);
  return (static_cast<std::uint64_t>(~low) << 32) | low;
}

TEST(RelaxedCopyConcurrent, WordsAreNeverTorn) {
  constexpr std::size_t kWords = 1027;
  constexpr std::uint32_t kRounds = 2000;
  std::vector<std::uint64_t> shared(kWords);
  for (std::size_t i = 0; i < kWords; ++i) shared[i] = word_of(0, i);
  std::atomic<bool> done{false};
  std::atomic<bool> started{false};
  std::jthread writer([&] {
    started.wait(false);
    std::vector<std::uint64_t> next(kWords);
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      for (std::size_t i = 0; i < kWords; ++i) next[i] = word_of(round, i);
      store_words_relaxed(next.data(), shared.data(), kWords * sizeof(std::uint64_t));
    }
    done = true;
  });
  std::vector<std::uint64_t> seen(kWords, 0);
  started = true;
  started.notify_one();
  bool last = false;
  do {
    last = done;  // one more copy after the writer has finished
    copy_words_relaxed(shared.data(), seen.data(), kWords * sizeof(std::uint64_t));
    for (std::size_t i = 0; i < kWords; ++i) {
      const auto low = static_cast<std::uint32_t>(seen[i]);
      const auto high = static_cast<std::uint32_t>(seen[i] >> 32);
      ASSERT_EQ(high, static_cast<std::uint32_t>(~low)) << "word " << i;
      const std::uint32_t offset = low - static_cast<std::uint32_t>(i);
      ASSERT_EQ(offset % 31, 0U) << "word " << i;
      ASSERT_LE(offset / 31, kRounds) << "word " << i;
    }
  } while (!last);
  for (std::size_t i = 0; i < kWords; ++i) ASSERT_EQ(seen[i], word_of(kRounds, i)) << i;
}

}  // namespace
}  // namespace psplus::kernels
