// What a simulated worker's program does: streams, steps under a scheme, barriers, cuts.

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "runtime/sim/world.hpp"
#include "worker/step_vector.hpp"

namespace psplus::sim {

Task Worker::live() {
  co_await attach();
  const auto& plans = world_.scenario().streams;
  for (std::size_t s = 0; s < plans.size(); ++s) {
    streams_.emplace_back();
    streams_.back().id = StreamId{static_cast<std::uint16_t>(s)};
    streams_.back().plan = &plans[s];
    co_await open(streams_.back());
  }
  while (Stream* const stream = next_stream()) {
    if (const StreamPlan& plan = *stream->plan; plan.barrier_every != 0) {
      const std::uint64_t every = plan.barrier_every + (plan.uneven ? raw(rank_) % 2 : 0);
      while (stream->barriers < stream->clock() / every) co_await barrier(*stream);
    }
    if (stream->clock() < stream->plan->target) {
      co_await step(*stream);
      continue;
    }
    stream->at_target = true;
    co_await flush(*stream);
    if (stream->plan->closes) co_await close(*stream);
  }
  for (Stream& stream : streams_)
    if (!stream.has_left) co_await flush(stream);
  co_await detach();
}

/// The stream with the lowest clock: an order that all workers share, whenever they joined, so that
/// none waits on one stream for another that waits for it on a second.
Worker::Stream* Worker::next_stream() {
  Stream* next = nullptr;
  for (Stream& stream : streams_)
    if (!stream.at_target && (next == nullptr || stream.clock() < next->clock())) next = &stream;
  return next;
}

Task Worker::open(Stream& stream) {
  co_await add_part(stream);
  const auto& ready = std::get<wire::StreamReady>(*answer_);
  const bool rejoined = ready.rejoined;
  stream.first_clock = raw(ready.clock);
  stream.barriers = ready.barriers;
  stream.mail = &mailbox_->streams[index(stream.id)];
  stream.queue = worker::PushQueue{*stream.mail, incarnation_};
  world_.checker().joined(stream.id, life(), *stream.mail, stream.barriers);
  if (!rejoined) co_await provide_or_wait(stream);
  // The first snapshot.
  if (stream.plan->pull == store::PullMode::kBuffered)
    co_await take_cut(stream);
  else
    co_await read_shard(stream, BatchId{0});
}

/// Adds the next extent to a stream that is under way, whatever the others do.
Task Worker::grow(Stream& stream) {
  co_await add_part(stream);
  if (!std::get<wire::StreamReady>(*answer_).rejoined) co_await provide_or_wait(stream);
  // As the real worker does: a buffered reply that is under way may lack the extent.
  if (stream.plan->pull == store::PullMode::kBuffered) {
    co_await take_cut(stream);
    stream.grown_at = stream.steps;
  } else {
    co_await read_shard(stream, BatchId{0});
  }
}

Task Worker::add_part(Stream& stream) {
  const StreamExtent place{static_cast<std::uint16_t>(stream.parts.size())};
  doing_ = formatted("opening extent {} of stream {}", raw(place), raw(stream.id));
  const store::ExtentLayout& layout = world_.layout(stream.id, place);
  const auto bytes = layout.serialize();
  co_await ask(wire::OpenStream{.stream = stream.id,
                                .extent = place,
                                .mode = stream.plan->mode(),
                                .pull = stream.plan->pull,
                                .rule = stream.plan->rule,
                                .bound = stream.plan->bound,
                                .layout_bytes = bytes.size(),
                                .blob_bytes = 0,
                                .has_blob = false},
               bytes);
  const auto* const ready = std::get_if<wire::StreamReady>(&*answer_);
  if (ready == nullptr || ready->stream != stream.id || ready->extent != place) {
    world_.checker().fail("protocol", "the server answered another question");
    throw Failed{};
  }
  Part part;
  part.id = ExtentId{control_->streams[index(stream.id)].extents[index(place)].load()};
  layout_version_ = std::max(layout_version_, raw(part.id) + 1U);
  part.slots =
      store::SlotsView{own_segment(store::SegmentKind::kSlots, part.id), layout, stream.plan->rule};
  part.shard = store::ShardView{own_segment(store::SegmentKind::kShard, part.id)};
  part.pull =
      store::PullView{own_segment(store::SegmentKind::kPull, part.id), layout.value_bytes()};
  if (!part.slots || !part.shard ||
      (stream.plan->pull == store::PullMode::kBuffered && !part.pull)) {
    world_.checker().fail("protocol", "an extent is ready, but a segment of it is missing");
    throw Failed{};
  }
  stream.parts.push_back(part);
}

Task Worker::provide_or_wait(Stream& stream) {
  const std::uint64_t bit = std::uint64_t{1} << (stream.parts.size() - 1);
  const auto initialised = [this, id = stream.parts.back().id] {
    return control_->extents[index(id)].initialised.load(std::memory_order_acquire) == 1;
  };
  while (!initialised()) {
    if ((stream.provides & bit) != 0) {
      if (stream.plan->rule.planes != 0) co_await push(stream, make_state_set(stream, true));
      co_await push(stream, make_set(stream, true));
      // As the real worker does: a reminder that comes meanwhile is no second request.
      co_await wait_for(formatted("setting the first values of stream {}", raw(stream.id)),
                        [&] { return stream.queue.all_applied(); });
      stream.provides &= ~bit;
    }
    co_await wait_for(formatted("waiting for the first values of stream {}", raw(stream.id)),
                      [&] { return initialised() || (stream.provides & bit) != 0; });
  }
}

Task Worker::step(Stream& stream) {
  const StreamPlan& plan = *stream.plan;
  co_await pause(world_.scenario().timing.compute);
  if (stream.parts.size() < plan.extents.size() && random_.chance(plan.grow)) co_await grow(stream);
  if (random_.chance(plan.set)) co_await set_values(stream);
  const bool eager = plan.scheme == Scheme::kPsPlus;
  if (eager) {
    // The only wait: for the reply to the push of the iteration before. What it brings is the
    // snapshot of the next step; this push was computed on the one before.
    const std::uint64_t snapshot = stream.snapshot_foreign;
    PushFacts facts = make_step(stream);
    facts.snapshot_foreign = snapshot;
    if (stream.steps > 0) co_await await_reply(stream, stream.steps);
    co_await push(stream, std::move(facts));
  } else {
    co_await push(stream, make_step(stream));
    co_await await_reply(stream, stream.steps);
  }
  if (random_.chance(plan.cut)) co_await take_cut(stream);
}

/// Waits until the reply to step number `steps_done` of this life is released, and takes the
/// snapshot that it brings.
Task Worker::await_reply(Stream& stream, std::uint64_t steps_done) {
  const std::uint64_t clock = stream.first_clock + steps_done;
  co_await wait_for(
      formatted("waiting for the reply to step {} of stream {}", clock, raw(stream.id)),
      [&] { return raw(stream.queue.released()) >= clock; });
  world_.checker().saw_released(stream.id, life(), clock);
  const BatchId own = batch_of_step(stream, steps_done);
  if (stream.grown_at == steps_done) co_return;  // its snapshot is newer
  if (stream.plan->pull == store::PullMode::kBuffered)
    read_buffer(stream, clock % 2, own);
  else
    co_await read_shard(stream, own);
}

BatchId Worker::batch_of_step(const Stream& stream, std::uint64_t steps) const {
  if (steps == 0) return BatchId{0};
  return world_.checker().batch_of(stream.id, life(), stream.step_sequence[steps - 1]);
}

void Worker::read_buffer(Stream& stream, std::size_t buffer, BatchId at_least) {
  std::vector<store::PullView> views;
  for (const Part& part : stream.parts) views.push_back(part.pull);
  world_.checker().read_cut(stream.id, member_, views, buffer, at_least);
  stream.snapshot_foreign =
      worker::load_step_vector(views.front().header().cuts[buffer]).foreign(member_);
}

/// A mapped snapshot: the step vector first, then chunk by chunk.
Task Worker::read_shard(Stream& stream, BatchId at_least) {
  Checker& checker = world_.checker();
  const auto vector = worker::load_step_vector(*control_, stream.id);
  at_least = std::max(at_least, checker.contained_in(stream.id, vector));
  std::vector<std::byte> chunk(world_.scenario().chunk_bytes);
  for (std::uint16_t e = 0; e < stream.parts.size(); ++e) {
    const store::ShardView& shard = stream.parts[e].shard;
    for (std::uint32_t c = 0; c < shard.header().chunk_count; ++c) {
      const auto batch = shard.read_chunk(ChunkIndex{c}, chunk);
      if (batch.ok())
        checker.read_chunk(stream.id, StreamExtent{e}, ChunkIndex{c}, *batch, chunk, at_least);
      else
        checker.fail("contents", batch.status().message());
      spend(1);
      if (random_.chance(0.3)) co_await sleep(random_.duration(nanoseconds{0}, nanoseconds{3000}));
    }
  }
  stream.snapshot_foreign = vector.foreign(member_);
}

/// Until all that this worker has published is applied and its replies are there.
Task Worker::flush(Stream& stream) {
  co_await wait_for(formatted("flushing stream {}", raw(stream.id)),
                    [&] { return stream.queue.all_applied(); });
  look_at_acknowledgements(stream);
  if (stream.steps > 0 && stream.plan->pull == store::PullMode::kBuffered)
    co_await wait_for(formatted("waiting for the last reply of stream {}", raw(stream.id)),
                      [&] { return raw(stream.queue.released()) >= stream.clock(); });
}

/// One cut that includes all own pushes.
Task Worker::take_cut(Stream& stream) {
  co_await flush(stream);
  const auto lacks_pull = [](const Part& part) { return !part.pull; };
  if (std::any_of(stream.parts.begin(), stream.parts.end(), lacks_pull)) {
    doing_ = formatted("asking for pull buffers of stream {}", raw(stream.id));
    co_await ask(wire::NeedPull{stream.id});
    for (std::uint16_t e = 0; e < stream.parts.size(); ++e)
      stream.parts[e].pull =
          store::PullView{own_segment(store::SegmentKind::kPull, stream.parts[e].id),
                          world_.layout(stream.id, StreamExtent{e}).value_bytes()};
    if (std::any_of(stream.parts.begin(), stream.parts.end(), lacks_pull)) {
      world_.checker().fail("protocol", "pull buffers are ready, but there are none");
      throw Failed{};
    }
  }
  // Not the buffer of the last reply; the next reply into this one follows the next push.
  const std::uint64_t buffer = (stream.clock() + 1) % 2;
  const std::uint64_t request = ++stream.cut_requests << 1 | buffer;
  spend(1);
  stream.mail->cut_requested.store(request, std::memory_order_seq_cst);
  ring();
  co_await wait_for(formatted("waiting for a cut of stream {}", raw(stream.id)), [&] {
    return stream.mail->cut_done.load(std::memory_order_acquire) == request;
  });
  const auto last = stream.queue.next();
  read_buffer(stream, buffer,
              world_.checker().batch_of(stream.id, life(), Sequence{raw(last) - 1}));
}

Task Worker::barrier(Stream& stream) {
  const std::uint64_t number = stream.barriers + 1;
  world_.checker().arrived(stream.id, life(), number);
  spend(1);
  stream.mail->barrier_arrived.store(number, std::memory_order_seq_cst);
  ring();
  co_await wait_for(formatted("standing at barrier {} of stream {}", number, raw(stream.id)), [&] {
    return stream.mail->barrier_released.load(std::memory_order_acquire) >= number;
  });
  world_.checker().passed(stream.id, number);
  stream.barriers = number;
}

Task Worker::close(Stream& stream) {
  stream.has_left = true;
  world_.checker().left(stream.id, life());
  doing_ = formatted("closing stream {}", raw(stream.id));
  co_await ask(wire::CloseStream{stream.id});
}

Task Worker::pause(Range range) {
  spend(1);
  co_await sleep(random_.duration(range.least, range.most));
}

}  // namespace psplus::sim
