#include "runtime/sim/reader.hpp"

#include <atomic>
#include <vector>

#include "base/format.hpp"
#include "kernels/relaxed_copy.hpp"
#include "runtime/sim/world.hpp"

namespace psplus::sim {
namespace {

constexpr std::size_t kPieceBytes = 64;

}  // namespace

Reader::Reader(World& world, Random random)
    : Actor(world.scheduler()), world_(world), random_(random) {
  for (std::uint16_t s = 0; s < world.scenario().streams.size(); ++s)
    for (std::uint16_t e = 0; e < world.scenario().streams[s].extents.size(); ++e)
      places_.push_back({StreamId{s}, StreamExtent{e}, {}});
  for (Place& place : places_)
    place.last.resize(world.layout(place.stream, place.extent).chunk_count());
}

void Reader::begin() { start(live(), milliseconds{1}); }

nanoseconds Reader::moment() {
  return random_.duration(nanoseconds{0}, 2 * world_.scenario().timing.store);
}

Task Reader::live() {
  for (;;) {
    Place& place = places_[random_.below(places_.size())];
    const std::size_t chunks = place.last.size();
    if (chunks != 0 && !world_.shard(place.stream, place.extent).bytes.empty())
      co_await read(place, ChunkIndex{static_cast<std::uint32_t>(random_.below(chunks))});
    co_await sleep(random_.duration(nanoseconds{0}, std::chrono::microseconds{150}));
  }
}

Task Reader::read(Place& place, ChunkIndex chunk) {
  std::vector<std::byte> copy;
  for (;;) {
    // Kept alive while it is read.
    const store::SegmentHandle segment = world_.shard(place.stream, place.extent);
    const store::ShardView shard{segment.bytes};
    const std::size_t bytes = shard.header().unit_bytes;
    copy.resize(bytes);
    const store::Word& entry = shard.entry(chunk);
    const std::uint64_t before = entry.load(std::memory_order_acquire);
    const auto now = store::ChunkEntry::unpack(before);
    for (std::size_t done = 0; done < bytes; done += kPieceBytes) {
      co_await sleep(moment());
      kernels::copy_words_relaxed(shard.unit(now.unit) + done, copy.data() + done, kPieceBytes);
    }
    co_await sleep(moment());
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.load(std::memory_order_relaxed) != before) continue;
    world_.count_read();
    BatchId& last = place.last[index(chunk)];
    if (now.batch < last)
      world_.checker().fail(
          "monotone", formatted("a reader sees batch {} of chunk {} after batch {}", raw(now.batch),
                                raw(chunk), raw(last)));
    last = now.batch;
    world_.checker().read_chunk(place.stream, place.extent, chunk, now.batch, copy, BatchId{0});
    co_return;
  }
}

void Reader::finished(std::exception_ptr error) {
  if (error) std::rethrow_exception(error);
}

}  // namespace psplus::sim
