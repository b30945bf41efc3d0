// Readers in processes of their own never see half a batch in a chunk.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>
#include <sched.h>

#include "job.hpp"
#include "kernels/kernels.hpp"
#include "kernels/relaxed_copy.hpp"
#include "worker/dense_stream.hpp"

namespace psplus::cluster {
namespace {

constexpr std::uint32_t kReaders = 2;
constexpr std::uint64_t kReadsEach = 5'000'000;
constexpr std::size_t kChunkBytes = 128;
constexpr std::size_t kPerChunk = kChunkBytes / sizeof(float);
constexpr std::size_t kChunks = 4;

struct Board {
  std::atomic<std::uint32_t> finished;
  std::atomic<std::uint64_t> batches_seen[kReaders];
  std::atomic<std::uint64_t> retries[kReaders];
  std::atomic<std::uint64_t> mixed_without_check[kReaders];
};

worker::StreamOptions asynchronous() { return {}; }

store::ExtentLayout layout_of_chunks() {
  return {{{"w", DType::float32, {kPerChunk * kChunks}}}, kChunkBytes};
}

/// Every push subtracts the same from all elements, so a chunk of one batch is all equal.
int run_writer(const JobDirectory& job, Board& board) {
  auto session = require(worker::Session::connect(session_options(job, 0, 1 + kReaders)));
  auto stream = require(worker::DenseStream::open(session, asynchronous(), layout_of_chunks(), {}));
  std::vector<float> values(kPerChunk * kChunks, 0.0F);
  const void* const readable[] = {values.data()};
  const std::uint8_t carried[] = {1};
  while (!require(stream->wait_initialised())) require(stream->publish_values(readable));
  while (board.finished.load() < kReaders) {
    stream->snapshot(readable);
    for (float& value : values) value += 3.0F;  // the server subtracts -3 / 3 workers
    static_cast<void>(require(stream->write_delta(readable, carried)));
    require(stream->publish(1.0));
  }
  require(stream->close(std::chrono::seconds{5}));
  return session->close(std::chrono::seconds{5}).ok() ? 0 : 1;
}

bool all_equal(const float* values) {
  return std::all_of(values, values + kPerChunk, [&](float value) { return value == values[0]; });
}

int run_reader(const JobDirectory& job, std::uint32_t reader, Board& board) {
  auto session = require(worker::Session::connect(session_options(job, 1 + reader, 1 + kReaders)));
  auto stream = require(worker::DenseStream::open(session, asynchronous(), layout_of_chunks(), {}));
  if (!require(stream->wait_initialised())) return 4;
  const store::ShardView shard{
      session->segment(SegmentId{session->control().extents[0].shard_segment.load()})->bytes()};
  float values[kPerChunk];
  const auto bytes = std::as_writable_bytes(std::span{values});
  std::uint64_t last[kChunks] = {};
  std::uint64_t retries = 0;
  for (std::uint64_t read = 0; read < kReadsEach; ++read) {
    const ChunkIndex chunk{static_cast<std::uint32_t>(read % kChunks)};
    // By a copy made of atomic words, or in place by the vector reads of the pull kernel.
    const BatchId batch =
        read / kChunks % 2 == 0
            ? require(shard.read_chunk(chunk, bytes, &retries))
            : require(shard.read_in_place(chunk, retries, [&](const std::byte* unit, bool) {
                kernels::best().float32.pull(DType::float32, reinterpret_cast<const float*>(unit),
                                             nullptr, 0.0F, values, kPerChunk);
              }));
    if (!all_equal(values)) return 5;
    if (raw(batch) < last[index(chunk)]) return 6;  // versions go up
    if (raw(batch) != last[index(chunk)]) ++board.batches_seen[reader];
    last[index(chunk)] = raw(batch);
  }
  board.retries[reader] = retries;

  // The same without the second look at the entry: it must meet mixed chunks, or this test shows
  // nothing.
  const Deadline limit = Deadline::after(std::chrono::seconds{20});
  while (board.mixed_without_check[reader].load() == 0 && !limit.passed()) {
    const auto entry = store::ChunkEntry::unpack(shard.entry(ChunkIndex{0}).load());
    const std::byte* const unit = shard.unit(entry.unit);
    kernels::copy_words_relaxed(unit, values, kChunkBytes / 2);
    ::sched_yield();
    kernels::copy_words_relaxed(unit + kChunkBytes / 2, values + kPerChunk / 2, kChunkBytes / 2);
    if (!all_equal(values)) ++board.mixed_without_check[reader];
  }
  ++board.finished;
  require(stream->close(std::chrono::seconds{5}));
  return session->close(std::chrono::seconds{5}).ok() ? 0 : 1;
}

TEST(MixedChunkTest, TenMillionReadsOfOtherProcessesAreWhole) {
  const JobDirectory job;
  const Shared<Board> board;
  std::vector<pid_t> processes{start_process([&] { return run_writer(job, *board); })};
  for (std::uint32_t reader = 0; reader < kReaders; ++reader)
    processes.push_back(start_process([&, reader] {
      const int status = run_reader(job, reader, *board);
      if (status != 0) ++board->finished;  // the writer need not wait for it
      return status;
    }));
  const Deadline limit = Deadline::after(std::chrono::seconds{110});
  for (const pid_t process : processes) {
    const int status = wait_process(process, limit);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << status << " (5: a mixed chunk, 6: an older version after a newer one)";
  }
  for (std::uint32_t reader = 0; reader < kReaders; ++reader) {
    EXPECT_GT(board->batches_seen[reader].load(), 100U) << "nothing was written meanwhile";
    EXPECT_GT(board->mixed_without_check[reader].load(), 0U)
        << "a reader without the second look must see a mixed chunk";
    std::printf("reader %u: %zu batches seen, %zu retries\n", reader,
                static_cast<std::size_t>(board->batches_seen[reader].load()),
                static_cast<std::size_t>(board->retries[reader].load()));
  }
}

}  // namespace
}  // namespace psplus::cluster
