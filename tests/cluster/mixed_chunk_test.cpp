// Readers in processes of their own never see half a batch in a chunk. Built with mutants of the
// reader and of the server too, which this test must notice (CMakeLists.txt).

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "job.hpp"
#include "kernels/kernels.hpp"
#include "worker/dense_stream.hpp"

namespace psplus::cluster {
namespace {

constexpr std::uint32_t kReaders = 2;
constexpr std::uint64_t kReadsEach = 5'000'000;  // at least: a reader goes on until it has seen
constexpr std::uint64_t kBatchesEach = 2'000;    // so many batches, and each of its ways to read
constexpr std::uint64_t kRetriesEach = 10;       // has met the server's writes so many times
constexpr std::size_t kChunkBytes = 128;
constexpr std::size_t kPerChunk = kChunkBytes / sizeof(float);
constexpr std::size_t kChunks = 8;
constexpr float kStep = 3;  // a push adds kStep / N to every scalar; N is 1 to 3

// How a reader ends.
constexpr int kNotInitialised = 4;
constexpr int kMixed = 5;
constexpr int kWentBack = 6;
constexpr int kTooMuch = 7;

std::string explained(int status) {
  if (!WIFEXITED(status)) return "a process was ended by a signal";
  switch (WEXITSTATUS(status)) {
    case kMixed:
      return "a reader saw a mixed chunk";
    case kWentBack:
      return "a reader saw an older version after a newer one";
    case kTooMuch:
      return "a reader saw more than was pushed";
    default:
      return "a process ended with status " + std::to_string(WEXITSTATUS(status));
  }
}

struct Board {
  std::atomic<std::uint32_t> finished;
  std::atomic<std::uint64_t> published;  ///< pushes
  std::atomic<std::uint64_t> batches_seen[kReaders];
  std::atomic<std::uint64_t> retries_of_copies[kReaders];
  std::atomic<std::uint64_t> retries_in_place[kReaders];
};

worker::StreamOptions asynchronous() { return {}; }

store::ExtentLayout layout_of_chunks() {
  return {{{"w", DType::float32, {kPerChunk * kChunks}}}, kChunkBytes};
}

/// Every push adds the same to all elements, so a chunk of one batch is all equal.
int run_writer(const JobDirectory& job, Board& board) {
  auto session = require(worker::Session::connect(session_options(job, 0, 1 + kReaders)));
  auto stream = require(worker::DenseStream::open(session, asynchronous(), layout_of_chunks(), {}));
  std::vector<float> values(kPerChunk * kChunks, 0.0F);
  const void* const readable[] = {values.data()};
  const std::uint8_t carried[] = {1};
  while (!require(stream->wait_initialised())) require(stream->publish_values(readable));
  while (board.finished.load() < kReaders) {
    stream->snapshot(readable);
    for (float& value : values) value += kStep;
    static_cast<void>(require(stream->write_delta(readable, carried)));
    ++board.published;
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
  if (!require(stream->wait_initialised())) return kNotInitialised;
  const store::ShardView shard{
      session->segment(SegmentId{session->control().extents[0].shard_segment.load()})->bytes()};
  float values[kPerChunk];
  const auto bytes = std::as_writable_bytes(std::span{values});
  std::uint64_t last[kChunks] = {};
  std::uint64_t batches = 0;
  std::uint64_t retries_of_copies = 0;
  std::uint64_t retries_in_place = 0;
  const Deadline limit = Deadline::after(std::chrono::seconds{30});
  const auto seen_enough = [&] {
    return batches >= kBatchesEach && retries_of_copies >= kRetriesEach &&
           retries_in_place >= kRetriesEach;
  };
  for (std::uint64_t read = 0; read < kReadsEach || !(seen_enough() || limit.passed()); ++read) {
    const ChunkIndex chunk{static_cast<std::uint32_t>(read % kChunks)};
    // By a copy made of atomic words, or in place by the vector reads of the pull kernel.
    const BatchId batch = read / kChunks % 2 == 0
                              ? require(shard.read_chunk(chunk, bytes, &retries_of_copies))
                              : require(shard.read_in_place(
                                    chunk, retries_in_place, [&](const std::byte* unit, bool) {
                                      kernels::best().float32.pull(
                                          DType::float32, reinterpret_cast<const float*>(unit),
                                          nullptr, 0.0F, values, kPerChunk);
                                    }));
    if (!all_equal(values)) return kMixed;
    if (raw(batch) < last[index(chunk)]) return kWentBack;
    if (values[0] > kStep * static_cast<float>(board.published.load())) return kTooMuch;
    if (raw(batch) != last[index(chunk)]) ++batches;
    last[index(chunk)] = raw(batch);
  }
  board.batches_seen[reader] = batches;
  board.retries_of_copies[reader] = retries_of_copies;
  board.retries_in_place[reader] = retries_in_place;
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
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << explained(status);
  }
  for (std::uint32_t reader = 0; reader < kReaders; ++reader) {
    EXPECT_GE(board->batches_seen[reader].load(), kBatchesEach) << "too little was written";
    EXPECT_GE(board->retries_of_copies[reader].load(), kRetriesEach) << "no read met a write";
    EXPECT_GE(board->retries_in_place[reader].load(), kRetriesEach) << "no read met a write";
  }
}

}  // namespace
}  // namespace psplus::cluster
