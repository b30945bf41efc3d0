// The server's state machine on one thread, workers on others, over the same memory: what the
// thread sanitizer must see, as it cannot relate two processes that share a mapping.

#include <array>
#include <thread>

#include "support/founded_job.hpp"
#include "worker/step_vector.hpp"

namespace psplus::server {
namespace {

using psplus::testing::FoundedJob;
using psplus::testing::kExtent;
using psplus::testing::kStream;
using psplus::testing::TestWorker;

constexpr std::uint64_t kPushes = 150;  // at least: a worker goes on until a read has met a write
constexpr std::uint64_t kReads = 400;   // after each push; 120,000 of both workers
constexpr std::int64_t kScalars = 300;
constexpr std::size_t kChunk = 512;

struct Outcome {
  std::string wrong;  ///< empty when nothing was
  std::uint64_t pushes = 0;
  std::uint64_t reads = 0;
  std::uint64_t retries = 0;
};

/// Reads two chunks as the server changes them; `last` is what was seen of each. Deltas are equal
/// in all scalars, so a chunk whose scalars differ is a mix of two batches.
void read_chunks(FoundedJob& job, std::array<float, 2>& last, Outcome& outcome) {
  const store::ShardView shard = job.store().shard(kExtent).view;
  std::vector<float> copy(kChunk / sizeof(float));
  for (std::uint64_t n = 0; n < kReads && outcome.wrong.empty(); ++n) {
    const std::size_t c = n % last.size();
    const worker::StepVector before = worker::load_step_vector(job.control(), kStream);
    const auto read = shard.read_chunk(ChunkIndex{static_cast<std::uint32_t>(c)},
                                       std::as_writable_bytes(std::span{copy}), &outcome.retries);
    if (!read.ok()) continue;  // busy: the next turn tries again
    ++outcome.reads;
    for (const float value : copy)
      if (value != copy[0]) outcome.wrong = "a chunk mixes two batches";
    if (copy[0] > last[c]) outcome.wrong = "a chunk went back in time";
    last[c] = copy[0];
    // Each push took 1 (two workers): the snapshot has at least what its step vector says.
    if (-copy[0] < static_cast<float>(before.pushes[0] + before.pushes[1]))
      outcome.wrong = "a snapshot lacks pushes that its step vector has";
  }
}

/// A worker's loop: pushes its delta and reads the shard meanwhile.
Outcome train(FoundedJob& job, TestWorker& worker) {
  Outcome outcome;
  worker::PushQueue& queue = worker.queues.at(kStream);
  const store::SlotsView slots = job.store().slots(worker.member, kExtent);
  WakeWord& wake = job.mail(worker, kStream).wake;
  std::array<float, 2> last{};
  const Deadline limit = Deadline::after(std::chrono::seconds{60});
  while (outcome.wrong.empty() &&
         (outcome.pushes < kPushes || (outcome.retries == 0 && !limit.passed()))) {
    const std::uint64_t n = ++outcome.pushes;
    const Deadline deadline = Deadline::after(std::chrono::seconds{60});
    if (!wait_until(wake, deadline, [&] { return queue.slot_is_free(); })) return {"no free slot"};
    const auto slot = slots.values(queue.next());
    const auto bits = slots.bitmap(queue.next());
    std::fill(bits.begin(), bits.end(), n % 3 == 0 ? 1u : ~std::uint64_t{0});
    auto* const delta = reinterpret_cast<float*>(slot.data());
    std::fill_n(delta, slot.size() / sizeof(float), 2.0F);
    if (!queue
             .publish(
                 {.flags = n % 2 == 0 ? std::uint32_t{store::kPushAllParams} : 0, .extents = 1})
             .ok())
      return {"the queue was closed"};
    read_chunks(job, last, outcome);
  }
  const Deadline deadline = Deadline::after(std::chrono::seconds{60});
  if (!wait_until(wake, deadline, [&] { return queue.all_applied(); }))
    outcome.wrong = "pushes are not in";
  return outcome;
}

TEST(Threads, WorkersPushAndReadWhileTheServerApplies) {
  FoundedJob job{
      2, store::ExtentLayout{{{"w", DType::float32, {kScalars}}}, kChunk}, {}, {.piece_bytes = 64}};
  TestWorker& zero = job.workers[0];
  const auto slot = job.slot(zero, kStream);
  std::fill(slot.begin(), slot.end(), std::byte{0});
  ASSERT_OK(job.publish(zero, {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
  job.run();
  std::atomic<bool> stop{false};
  std::thread server{[&] {
    bool more = false;
    while (!stop.load()) {
      if (!more) job.core().handle(Doorbell{}, Clock::now());
      more = job.core().step(1024, Clock::now());
      for (const Effect& effect : job.core().take_effects())
        if (const auto* const woken = std::get_if<Wake>(&effect))
          notify(job.store().mail(woken->member, woken->stream).wake);
      if (!more) std::this_thread::yield();
    }
  }};
  Outcome outcomes[2];
  std::thread other{[&] { outcomes[1] = train(job, job.workers[1]); }};
  outcomes[0] = train(job, job.workers[0]);
  other.join();
  stop = true;
  server.join();
  const std::uint64_t pushes = outcomes[0].pushes + outcomes[1].pushes;
  EXPECT_EQ(outcomes[0].wrong, "");
  EXPECT_EQ(outcomes[1].wrong, "");
  EXPECT_GE(outcomes[0].reads + outcomes[1].reads, 100'000u);
  EXPECT_GT(outcomes[0].retries, 0u) << "no read met a write";
  EXPECT_GT(outcomes[1].retries, 0u) << "no read met a write";
  EXPECT_EQ(job.control().streams[0].total_pushes.load(), pushes);
  EXPECT_EQ(job.values(kExtent), std::vector<double>(kScalars, -static_cast<double>(pushes)));
}

}  // namespace
}  // namespace psplus::server
