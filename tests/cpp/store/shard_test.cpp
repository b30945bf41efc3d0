#include "store/shard.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "base/clock.hpp"
#include "kernels/relaxed_copy.hpp"
#include "support/heap_segments.hpp"
#include "support/random_layouts.hpp"
#include "support/status_matchers.hpp"

namespace psplus::store {
namespace {

using psplus::testing::FailsWith;
using psplus::testing::heap_segment;
using psplus::testing::random_params;

constexpr std::size_t kChunk = 256;

ExtentLayout layout_of_chunks(std::int64_t chunks) {
  return ExtentLayout{{{"w", DType::float32, {chunks * static_cast<std::int64_t>(kChunk / 4)}}},
                      kChunk};
}

struct Shard {
  explicit Shard(const ExtentLayout& layout, Rule rule = {})
      : segment(heap_segment(ShardView::segment_bytes(layout, rule))) {
    ShardView::format(segment.bytes, layout, rule);
    view = ShardView{segment.bytes};
  }
  [[nodiscard]] ShardHeader& header() const {
    return *reinterpret_cast<ShardHeader*>(segment.bytes.data());
  }
  SegmentHandle segment;
  ShardView view;
};

TEST(ShardView, FormatPutsChunkCIntoUnitCAsBatchZero) {
  std::mt19937_64 random{3};
  for (int turn = 0; turn < 100; ++turn) {
    const std::size_t chunk_bytes = 64 * (random() % 3 + 1);
    const ExtentLayout layout{random_params(random, chunk_bytes), chunk_bytes};
    const Shard shard{layout};
    ASSERT_OK(shard.view.check());
    ASSERT_EQ(shard.view.header().chunk_count, layout.chunk_count());
    EXPECT_EQ(shard.view.header().unit_count, layout.chunk_count() + kSpareUnits);
    for (std::uint32_t c = 0; c < layout.chunk_count(); ++c)
      EXPECT_EQ(shard.view.entry(ChunkIndex{c}).load(), c);
    const auto parsed = ExtentLayout::parse(shard.view.layout_bytes());
    ASSERT_OK(parsed);
    EXPECT_OK(match_layouts(layout, *parsed, Rank{0}));
    const auto free = FreeUnits::derive(shard.view);
    ASSERT_OK(free);
    EXPECT_EQ(free->spare(0), UnitIndex{layout.chunk_count()});
    // Units end with the segment, each 64-byte aligned.
    EXPECT_EQ(shard.view.unit(UnitIndex{shard.view.header().unit_count}),
              shard.segment.bytes.data() + shard.segment.bytes.size());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(shard.view.unit(UnitIndex{0})) % 4096, 0u);
  }
}

constexpr Rule kRules[] = {{RuleKind::kNone, 0}, {RuleKind::kSgd, 0},  {RuleKind::kSgd, 1},
                           {RuleKind::kAdam, 2}, {RuleKind::kAdam, 3}, {RuleKind::kAdagrad, 1}};

TEST(ShardView, AUnitHasValuesThenStateThenCounts) {
  std::mt19937_64 random{4};
  for (int turn = 0; turn < 100; ++turn) {
    const std::size_t chunk_bytes = 64 * (random() % 3 + 1);
    const ExtentLayout layout{random_params(random, chunk_bytes), chunk_bytes};
    for (const Rule rule : kRules) {
      const Shard shard{layout, rule};
      ASSERT_OK(shard.view.check());
      EXPECT_TRUE(shard.view.fits(layout));
      EXPECT_EQ(shard.view.rule(), rule);
      EXPECT_EQ(shard.view.chunk_bytes(), chunk_bytes);
      EXPECT_EQ(shard.view.counts_offset(), chunk_bytes * (1 + rule.planes));
      EXPECT_EQ(shard.view.header().unit_bytes % 64, 0u);
      // Room for one count a parameter of the chunk that has most of them.
      std::size_t most = 0;
      for (std::uint32_t c = 0; c < layout.chunk_count(); ++c) {
        std::size_t here = 0;
        for (const ParamPlace& place : layout.places())
          if (place.scalar_count != 0 && place.byte_offset < (c + 1) * chunk_bytes &&
              place.byte_end() > c * chunk_bytes)
            ++here;
        most = std::max(most, here);
      }
      const std::size_t expected = rule.planes == 0 ? 0 : (most * 8 + 63) / 64 * 64;
      EXPECT_EQ(shard.view.header().count_bytes, expected);
      EXPECT_EQ(shard.view.unit(UnitIndex{shard.view.header().unit_count}),
                shard.segment.bytes.data() + shard.segment.bytes.size());
      ASSERT_OK(FreeUnits::derive(shard.view));
    }
  }
}

TEST(ShardView, DamagedRulesAreRefused) {
  const auto damaged = FailsWith(StatusCode::kInternal, "a shard segment is damaged");
  const ExtentLayout layout = layout_of_chunks(3);
  const auto check_with = [&](Rule rule, auto change) {
    const Shard shard{layout, rule};
    change(shard.header());
    return shard.view.check();
  };
  const Rule momentum{RuleKind::kSgd, 1};
  EXPECT_OK(check_with(momentum, [](ShardHeader&) {}));
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.rule_kind = 4; }), damaged);
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.rule_kind = 257; }), damaged);
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.rule_kind = 0; }), damaged);
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.planes = 2; }), damaged);
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.planes = 257; }), damaged);
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.count_bytes = h.unit_bytes; }), damaged);
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.count_bytes = ~std::uint64_t{0}; }),
              damaged);
  EXPECT_THAT(check_with(momentum, [](ShardHeader& h) { h.count_bytes -= 8; }), damaged);
  EXPECT_THAT(check_with({}, [](ShardHeader& h) { h.count_bytes = 64; }), damaged);

  // Whole in itself, but not of the layout.
  const Shard halved{layout};
  halved.header().rule_kind = raw(RuleKind::kSgd);
  halved.header().planes = 1;
  EXPECT_OK(halved.view.check());
  EXPECT_FALSE(halved.view.fits(layout));
}

TEST(ShardView, DamagedHeadersAreRefused) {
  const auto damaged = FailsWith(StatusCode::kInternal, "a shard segment is damaged");
  const auto check_with = [](auto change) {
    const Shard shard{layout_of_chunks(3)};
    change(shard.header());
    return shard.view.check();
  };
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  EXPECT_OK(check_with([](ShardHeader&) {}));
  EXPECT_THAT(check_with([](ShardHeader& h) { h.layout_offset += 64; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.layout_bytes += 64; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.layout_bytes = kAll; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.table_offset -= 8; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.pool_offset = 0; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.unit_bytes = 0; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.unit_bytes += 8; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.unit_bytes += 64; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.unit_bytes = kAll - 63; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.chunk_count += 1; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) { h.unit_count += 1; }), damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) {
                h.chunk_count = 0xffffffff;
                h.unit_count = 0;
              }),
              damaged);
  EXPECT_THAT(check_with([](ShardHeader& h) {
                h.chunk_count += 1;
                h.unit_count += 1;
              }),
              damaged);
  const Shard shard{layout_of_chunks(3)};
  for (const std::size_t size : {std::size_t{0}, std::size_t{127}, shard.segment.bytes.size() - 1})
    EXPECT_THAT(ShardView{shard.segment.bytes.first(size)}.check(), damaged);
}

TEST(ShardView, DamagedTablesAreRefused) {
  const Shard shard{layout_of_chunks(3)};
  shard.view.entry(ChunkIndex{1}).store(ChunkEntry{BatchId{5}, UnitIndex{4}}.pack());
  EXPECT_THAT(shard.view.check(), FailsWith(StatusCode::kInternal, "damaged"));
  shard.view.entry(ChunkIndex{1}).store(ChunkEntry{BatchId{5}, UnitIndex{3}}.pack());
  EXPECT_OK(shard.view.check());
  shard.view.entry(ChunkIndex{2}).store(ChunkEntry{BatchId{6}, UnitIndex{3}}.pack());
  EXPECT_THAT(FreeUnits::derive(shard.view),
              FailsWith(StatusCode::kInternal, "chunk 2 names unit 3, which is taken"));
}

TEST(FreeUnits, AreThePoolLessTheTable) {
  const Shard shard{layout_of_chunks(3)};
  shard.view.entry(ChunkIndex{0}).store(ChunkEntry{BatchId{9}, UnitIndex{3}}.pack());
  auto free = FreeUnits::derive(shard.view);
  ASSERT_OK(free);
  EXPECT_EQ(free->spare(0), UnitIndex{0});
  free->exchange(0, UnitIndex{2});
  EXPECT_EQ(free->spare(0), UnitIndex{2});
}

TEST(ReadChunk, CopiesTheUnitThatTheEntryNames) {
  const Shard shard{layout_of_chunks(3)};
  std::memset(shard.view.unit(UnitIndex{1}), 0x11, kChunk);
  std::memset(shard.view.unit(UnitIndex{3}), 0x33, kChunk);
  std::vector<std::byte> out(kChunk, std::byte{0xee});
  std::uint64_t retries = 7;
  auto batch = shard.view.read_chunk(ChunkIndex{1}, out, &retries);
  ASSERT_OK(batch);
  EXPECT_EQ(*batch, BatchId{0});
  EXPECT_EQ(out, std::vector<std::byte>(kChunk, std::byte{0x11}));
  shard.view.entry(ChunkIndex{1}).store(ChunkEntry{BatchId{8}, UnitIndex{3}}.pack());
  batch = shard.view.read_chunk(ChunkIndex{1}, std::span{out}.first(64), &retries);
  ASSERT_OK(batch);
  EXPECT_EQ(*batch, BatchId{8});
  EXPECT_TRUE(
      std::all_of(out.begin(), out.begin() + 64, [](std::byte b) { return b == std::byte{0x33}; }));
  EXPECT_TRUE(
      std::all_of(out.begin() + 64, out.end(), [](std::byte b) { return b == std::byte{0x11}; }));
  EXPECT_EQ(retries, 7u) << "nothing moved, so nothing was read twice";
}

TEST(ReadChunk, GivesUpAfterTheTriesItHas) {
  const Shard shard{layout_of_chunks(1)};
  std::vector<std::byte> out(kChunk);
  EXPECT_THAT(shard.view.read_chunk(ChunkIndex{0}, out, nullptr, 0),
              FailsWith(StatusCode::kBusy, "chunk 0 changed during each of 0 reads"));
}

// A writer that flips chunks the way the server does, readers that copy meanwhile: whatever is
// returned is one batch's chunk, and batches never go back.
TEST(ReadChunk, NeverMixesTwoBatches) {
  constexpr std::uint64_t kReads = 100'000;
  const ExtentLayout layout = layout_of_chunks(2);
  const Shard shard{layout};
  std::atomic<bool> stop{false};
  std::thread writer{[&] {
    auto free = FreeUnits::derive(shard.view);
    std::vector<std::uint64_t> values(kChunk / 8);
    for (std::uint64_t batch = 1; !stop.load(std::memory_order_relaxed); ++batch) {
      const ChunkIndex chunk{static_cast<std::uint32_t>(batch % 2)};
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = batch << 8 | i;
      kernels::store_words_relaxed(values.data(), shard.view.unit(free->spare(0)), kChunk);
      Word& entry = shard.view.entry(chunk);
      const UnitIndex replaced = ChunkEntry::unpack(entry.load(std::memory_order_relaxed)).unit;
      entry.store(ChunkEntry{BatchId{batch}, free->spare(0)}.pack(), std::memory_order_release);
      free->exchange(0, replaced);
      std::atomic_thread_fence(std::memory_order_release);
    }
  }};
  std::uint64_t read = 0;
  std::uint64_t busy = 0;
  std::uint64_t retries = 0;
  BatchId last[2] = {};
  const Deadline deadline = Deadline::after(std::chrono::seconds{60});
  std::vector<std::uint64_t> out(kChunk / 8);
  const Deadline enough = Deadline::after(milliseconds{400});
  while ((read < kReads || !enough.passed()) && !deadline.passed()) {
    for (std::uint32_t c = 0; c < 2; ++c) {
      const auto batch =
          shard.view.read_chunk(ChunkIndex{c}, std::as_writable_bytes(std::span{out}), &retries);
      if (!batch.ok()) {
        EXPECT_EQ(batch.status().code(), StatusCode::kBusy);
        ++busy;
        continue;
      }
      ++read;
      EXPECT_GE(*batch, last[c]);
      last[c] = *batch;
      for (std::size_t i = 0; i < out.size(); ++i)
        ASSERT_EQ(out[i], *batch == BatchId{0} ? 0 : raw(*batch) << 8 | i)
            << "word " << i << " of chunk " << c << " is of another batch";
    }
  }
  stop = true;
  writer.join();
  EXPECT_GE(read, kReads);
  EXPECT_GT(raw(last[0]), 0u);
  RecordProperty("retries", std::to_string(retries));
  RecordProperty("busy", std::to_string(busy));
}

}  // namespace
}  // namespace psplus::store
