#include "store/layout.hpp"

#include <algorithm>
#include <limits>
#include <set>

#include "store/limits.hpp"
#include "support/random_layouts.hpp"
#include "support/status_matchers.hpp"
#include "wire/codec.hpp"

namespace psplus::store {
namespace {

using psplus::testing::FailsWith;
using psplus::testing::random_params;

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

TEST(ExtentLayout, PlacesByHand) {
  const ExtentLayout layout{{{"weight", DType::float32, {3, 10}},  // 120 bytes
                             {"double", DType::float64, {9}},      // second section
                             {"half", DType::bfloat16, {17}},      // 17 float32
                             {"empty", DType::float32, {0, 5}},
                             {"scalar", DType::float16, {}},       // 1 float32
                             {"phase", DType::complex64, {2, 2}},  // 8 float32
                             {"wave", DType::complex128, {1}}},    // 2 float64
                            128};
  struct Expected {
    std::uint64_t offset, scalars;
    Storage storage;
  };
  const Expected expected[] = {{0, 30, Storage::float32},   {384, 9, Storage::float64},
                               {128, 17, Storage::float32}, {256, 0, Storage::float32},
                               {256, 1, Storage::float32},  {320, 8, Storage::float32},
                               {512, 2, Storage::float64}};
  ASSERT_EQ(layout.places().size(), std::size(expected));
  for (std::size_t i = 0; i < std::size(expected); ++i) {
    SCOPED_TRACE(layout.params()[i].name);
    EXPECT_EQ(layout.places()[i].byte_offset, expected[i].offset);
    EXPECT_EQ(layout.places()[i].scalar_count, expected[i].scalars);
    EXPECT_EQ(layout.places()[i].storage, expected[i].storage);
  }
  EXPECT_EQ(layout.chunk_count(), 5u);
  EXPECT_EQ(layout.value_bytes(), 640u);
  EXPECT_EQ(layout.bitmap_bytes(), 8u);
  for (std::uint32_t c = 0; c < 5; ++c)
    EXPECT_EQ(layout.storage_of_chunk(ChunkIndex{c}), c < 3 ? Storage::float32 : Storage::float64);
  EXPECT_EQ(std::vector<std::uint32_t>(layout.order().begin(), layout.order().end()),
            (std::vector<std::uint32_t>{0, 2, 4, 5, 1, 6}));
}

TEST(ExtentLayout, OfNothingIsEmpty) {
  for (const ExtentLayout& layout :
       {ExtentLayout{{}, 64}, ExtentLayout{{{"none", DType::float64, {4, 0}}}, 64}}) {
    EXPECT_EQ(layout.chunk_count(), 0u);
    EXPECT_EQ(layout.value_bytes(), 0u);
    EXPECT_TRUE(layout.order().empty());
  }
}

TEST(ExtentLayout, BitmapsAreWholeWords) {
  for (const std::size_t count : {0u, 1u, 63u, 64u, 65u, 128u, 129u}) {
    std::vector<ParamSpec> params(count);
    for (std::size_t i = 0; i < count; ++i) params[i] = {std::to_string(i), DType::float32, {1}};
    EXPECT_EQ((ExtentLayout{params, 64}.bitmap_bytes()), (count + 63) / 64 * 8) << count;
  }
}

TEST(ExtentLayout, RandomLayoutsKeepTheInvariants) {
  std::mt19937_64 random{7};
  for (int turn = 0; turn < 500; ++turn) {
    const std::size_t chunk_bytes = 64 * (random() % 4 + 1);
    const ExtentLayout layout{random_params(random, chunk_bytes), chunk_bytes};
    SCOPED_TRACE(turn);
    // A map of the whole extent, byte by byte: who lies where.
    std::vector<int> owner(layout.value_bytes(), -1);
    std::uint64_t elements = 0;
    for (std::size_t i = 0; i < layout.places().size(); ++i) {
      const ParamPlace& place = layout.places()[i];
      const ParamSpec& param = layout.params()[i];
      elements = 1;
      for (const std::int64_t size : param.shape) elements *= static_cast<std::uint64_t>(size);
      EXPECT_EQ(place.byte_offset % 64, 0u);
      EXPECT_EQ(place.storage, storage_of(param.dtype));
      EXPECT_EQ(place.scalar_count, elements * scalars_per_element(param.dtype));
      ASSERT_LE(place.byte_end(), layout.value_bytes());
      for (std::uint64_t b = place.byte_offset; b < place.byte_end(); ++b) {
        ASSERT_EQ(owner[b], -1) << "two parameters share byte " << b;
        owner[b] = static_cast<int>(i);
        ASSERT_EQ(layout.storage_of_chunk(ChunkIndex{static_cast<std::uint32_t>(b / chunk_bytes)}),
                  place.storage);
      }
    }
    for (std::uint32_t c = 0; c < layout.chunk_count(); ++c) {
      std::set<int> expected(owner.begin() + static_cast<std::ptrdiff_t>(c * chunk_bytes),
                             owner.begin() + static_cast<std::ptrdiff_t>((c + 1) * chunk_bytes));
      expected.erase(-1);
      const auto [first, last] = layout.params_of_chunk(ChunkIndex{c});
      std::set<int> found;
      for (std::uint32_t i = first; i < last; ++i)
        found.insert(static_cast<int>(layout.order()[i]));
      EXPECT_EQ(found, expected) << "chunk " << c;
      EXPECT_EQ(found.size(), last - first);
    }
    EXPECT_TRUE(std::is_sorted(
        layout.order().begin(), layout.order().end(), [&](std::uint32_t a, std::uint32_t b) {
          return layout.places()[a].byte_offset < layout.places()[b].byte_offset;
        }));
  }
}

TEST(ExtentLayout, MisuseThrowsAndNamesTheParameter) {
  const auto make = [](std::vector<ParamSpec> params, std::size_t chunk_bytes) {
    return ExtentLayout{std::move(params), chunk_bytes};
  };
  const auto message_of = [&](std::vector<ParamSpec> params, std::size_t chunk_bytes) {
    try {
      make(std::move(params), chunk_bytes);
    } catch (const std::invalid_argument& error) {
      return std::string{error.what()};
    }
    return std::string{"nothing was thrown"};
  };
  using ::testing::HasSubstr;
  for (const std::size_t chunk : {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{65},
                                  ~std::size_t{0} - 63, std::size_t{1} << 63})
    EXPECT_THAT(message_of({}, chunk), HasSubstr("chunk_bytes must be")) << chunk;
  EXPECT_THAT(message_of({{"a", DType::float32, {1}}, {"a", DType::float64, {2}}}, 64),
              HasSubstr("two parameters are named 'a'"));
  EXPECT_THAT(message_of({{"neg", DType::float32, {2, -1}}}, 64),
              HasSubstr("'neg' has a negative size"));
  EXPECT_THAT(message_of({{"big", DType::float32, {kHuge, kHuge, kHuge, kHuge}}}, 64),
              HasSubstr("'big' is too large"));
  EXPECT_THAT(message_of({{"large", DType::float32, {1 << 30}}}, 64),
              HasSubstr("more than 2^24 chunks of 64 bytes"));
  // Regression: sums of many large parameters wrapped around.
  std::vector<ParamSpec> many(8192);
  for (std::size_t i = 0; i < many.size(); ++i)
    many[i] = {std::to_string(i), DType::complex128, {std::int64_t{1} << 48}};
  EXPECT_THAT(message_of(many, 1 << 20), HasSubstr("more than 2^24 chunks"));
}

TEST(ExtentLayout, SurvivesSerialisation) {
  std::mt19937_64 random{11};
  for (int turn = 0; turn < 200; ++turn) {
    const std::size_t chunk_bytes = 64 * (random() % 4 + 1);
    const ExtentLayout layout{random_params(random, chunk_bytes), chunk_bytes};
    const auto back = ExtentLayout::parse(layout.serialize());
    ASSERT_OK(back);
    EXPECT_TRUE(std::equal(layout.params().begin(), layout.params().end(), back->params().begin(),
                           back->params().end()));
    EXPECT_EQ(back->chunk_bytes(), layout.chunk_bytes());
    EXPECT_EQ(back->chunk_count(), layout.chunk_count());
    EXPECT_OK(match_layouts(layout, *back, Rank{0}));
  }
}

std::vector<std::byte> sample_bytes() {
  return ExtentLayout{{{"one", DType::float32, {3, 4}}, {"two", DType::complex128, {}}}, 128}
      .serialize();
}

TEST(ExtentLayout, TruncatedAndOverlongBytesAreRefused) {
  auto bytes = sample_bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THAT(ExtentLayout::parse(std::span{bytes}.first(size)),
                FailsWith(StatusCode::kInternal, "a damaged layout"))
        << size;
  bytes.push_back(std::byte{0});
  EXPECT_THAT(ExtentLayout::parse(bytes), FailsWith(StatusCode::kInternal, "a damaged layout"));
}

TEST(ExtentLayout, CorruptBytesAreRefusedOrAnotherLayoutButNeverHarm) {
  const auto bytes = sample_bytes();
  std::mt19937_64 random{13};
  for (int turn = 0; turn < 20'000; ++turn) {
    auto damaged = bytes;
    for (std::uint64_t i = random() % 4 + 1; i > 0; --i)
      damaged[random() % damaged.size()] = static_cast<std::byte>(random() & 0xff);
    const auto layout = ExtentLayout::parse(damaged);
    if (!layout.ok()) {
      EXPECT_EQ(layout.status().code(), StatusCode::kInternal);
      continue;
    }
    EXPECT_EQ(layout->serialize(), damaged);
  }
}

TEST(ExtentLayout, AClaimOfMoreParametersThanBytesAllocatesNothing) {
  wire::Writer writer;
  writer.put(std::uint32_t{1});
  writer.put(std::uint64_t{64});
  writer.put(std::uint64_t{1} << 60);
  EXPECT_THAT(ExtentLayout::parse(writer.take()),
              FailsWith(StatusCode::kInternal, "a damaged layout"));
}

TEST(MatchLayouts, NamesTheFirstDifferenceWithBothSides) {
  const auto layout = [](std::vector<ParamSpec> params, std::size_t chunk = 64) {
    return ExtentLayout{std::move(params), chunk};
  };
  const ParamSpec a{"fc.weight", DType::float32, {3, 4}};
  const ParamSpec b{"fc.bias", DType::float32, {3}};
  const auto mismatch = [](const char* text) {
    return FailsWith(StatusCode::kLayoutMismatch, text);
  };
  const auto job = layout({a, b});
  EXPECT_OK(match_layouts(job, layout({a, b}), Rank{5}));
  EXPECT_THAT(
      match_layouts(job, layout({a, {"fc.bias", DType::float32, {7}}}), Rank{5}),
      mismatch("parameter 'fc.bias' is float32 of shape [7] on rank 5, but float32 of shape "
               "[3] in the job"));
  EXPECT_THAT(match_layouts(job, layout({{"fc.weight", DType::float32, {4, 3}}, b}), Rank{5}),
              mismatch("'fc.weight' is float32 of shape [4, 3] on rank 5, but float32 of shape "
                       "[3, 4] in the job"));
  EXPECT_THAT(match_layouts(job, layout({{"fc.weight", DType::bfloat16, {3, 4}}, b}), Rank{5}),
              mismatch("'fc.weight' is bfloat16 of shape [3, 4] on rank 5, but float32"));
  EXPECT_THAT(match_layouts(job, layout({b, a}), Rank{5}),
              mismatch("parameter 0 is 'fc.bias' on rank 5, but 'fc.weight' in the job"));
  EXPECT_THAT(match_layouts(job, layout({a}), Rank{5}),
              mismatch("rank 5 has 1 parameters, the job has 2; the first extra one is 'fc.bias'"));
  EXPECT_THAT(match_layouts(layout({a}), layout({a, b}), Rank{6}),
              mismatch("rank 6 has 2 parameters, the job has 1; the first extra one is 'fc.bias'"));
  EXPECT_THAT(match_layouts(job, layout({a, b}, 128), Rank{5}),
              mismatch("rank 5 uses chunks of 128 bytes, the job uses 64"));
}

}  // namespace
}  // namespace psplus::store
