// The server's state machine on one thread, workers on others, over the same memory: what the
// thread sanitizer must see, as it cannot relate two processes that share a mapping.

#include <thread>

#include "support/founded_job.hpp"
#include "worker/step_vector.hpp"

namespace psplus::server {
namespace {

using psplus::testing::FoundedJob;
using psplus::testing::kExtent;
using psplus::testing::kStream;
using psplus::testing::TestWorker;

constexpr std::uint64_t kPushes = 150;
constexpr std::int64_t kScalars = 300;
constexpr std::size_t kChunk = 512;

/// A worker's loop: pushes its delta and reads the shard meanwhile. Its deltas are equal in all
/// scalars, so a chunk whose scalars differ is a mix of two batches. Returns what went wrong.
std::string train(FoundedJob& job, TestWorker& worker) {
  worker::PushQueue& queue = worker.queues.at(kStream);
  const store::SlotsView slots = job.store().slots(worker.member, kExtent);
  const store::ShardView shard = job.store().shard(kExtent).view;
  WakeWord& wake = job.mail(worker, kStream).wake;
  std::vector<float> chunk(kChunk / sizeof(float));
  float last = 0;
  for (std::uint64_t n = 1; n <= kPushes; ++n) {
    const Deadline deadline = Deadline::after(std::chrono::seconds{60});
    if (!wait_until(wake, deadline, [&] { return queue.slot_is_free(); })) return "no free slot";
    const auto slot = slots.values(queue.next());
    const auto bits = slots.bitmap(queue.next());
    std::fill(bits.begin(), bits.end(), n % 3 == 0 ? 1u : ~std::uint64_t{0});
    auto* const delta = reinterpret_cast<float*>(slot.data());
    std::fill_n(delta, slot.size() / sizeof(float), 2.0F);
    if (!queue
             .publish(
                 {.flags = n % 2 == 0 ? std::uint32_t{store::kPushAllParams} : 0, .extents = 1})
             .ok())
      return "the queue was closed";
    const worker::StepVector before = worker::load_step_vector(job.control(), kStream);
    const auto read = shard.read_chunk(ChunkIndex{0}, std::as_writable_bytes(std::span{chunk}));
    if (!read.ok()) continue;  // busy: the next turn tries again
    for (const float value : chunk)
      if (value != chunk[0]) return "a chunk mixes two batches";
    if (chunk[0] > last) return "a chunk went back in time";
    last = chunk[0];
    // Each push took 1 (two workers): the snapshot has at least what its step vector says.
    const std::uint64_t said = before.pushes[0] + before.pushes[1];
    if (-chunk[0] < static_cast<float>(said))
      return "a snapshot lacks pushes that its step vector has";
  }
  const Deadline deadline = Deadline::after(std::chrono::seconds{60});
  if (!wait_until(wake, deadline, [&] { return queue.all_applied(); })) return "pushes are not in";
  return "";
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
  std::string wrong[2];
  std::thread other{[&] { wrong[1] = train(job, job.workers[1]); }};
  wrong[0] = train(job, job.workers[0]);
  other.join();
  stop = true;
  server.join();
  EXPECT_EQ(wrong[0], "");
  EXPECT_EQ(wrong[1], "");
  EXPECT_EQ(job.control().streams[0].total_pushes.load(), 2 * kPushes);
  EXPECT_EQ(job.values(kExtent), std::vector<double>(kScalars, -2.0 * kPushes));
}

}  // namespace
}  // namespace psplus::server
