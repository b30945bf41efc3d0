// How a simulated worker makes, writes and publishes a push, and where it may die meanwhile.

#include "base/format.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "runtime/sim/world.hpp"

namespace psplus::sim {
namespace {

/// Deltas are multiples of 60, so that a mean over 1 to 5 workers is exact; halves and doubles of
/// whole numbers are exact too. Nothing here grows beyond 2^24.
constexpr double kUnit = 60;

}  // namespace

PushFacts Worker::make_step(Stream& stream) {
  const StreamPlan& plan = *stream.plan;
  PushFacts facts;
  facts.snapshot_foreign = stream.snapshot_foreign;
  constexpr double kLambdas[] = {1.0, 1.0, 0.5, 2.0};
  facts.lambda = kLambdas[random_.below(4)];
  facts.flags = store::kPushAllParams;
  const bool empty = random_.chance(plan.empty);
  const bool partial = !empty && random_.chance(plan.partial);
  if (empty) facts.flags = store::kPushEmpty;
  if (partial) facts.flags = 0;
  const std::uint64_t all = (std::uint64_t{1} << stream.parts.size()) - 1;
  // Some steps carry nothing of some extents; if of none, that is said as an empty one is.
  if (!empty) facts.extents = random_.chance(0.2) ? random_.next() & all : all;
  if (facts.extents == 0) facts.flags = store::kPushEmpty;
  if (random_.chance(0.25)) facts.flags |= store::kPushUndivided;
  for (std::uint16_t e = 0; e < stream.parts.size(); ++e) {
    const ExpectedShard& shard = world_.checker().shard(stream.id, StreamExtent{e});
    PushValues& values = facts.values.emplace_back();
    if ((facts.extents >> e & 1) == 0) continue;
    values.carried.assign(shard.layout().params().size(), true);
    if (partial)
      for (std::size_t p = 0; p < values.carried.size(); ++p)
        values.carried[p] = random_.chance(0.6);
    fill(values, shard);
    if (!plan.rule.steps()) continue;
    const double rate = random_.chance(0.5) ? 1.0 : 0.5;
    for (std::size_t p = 0; p < values.carried.size(); ++p)
      values.rates.push_back(p % 2 == 0 ? rate : 2 * rate);
  }
  return facts;
}

PushFacts Worker::make_state_set(Stream& stream, bool initial) {
  PushFacts facts = make_set(stream, initial);
  facts.flags = store::set_plane(0);
  facts.initial = false;
  for (PushValues& values : facts.values)
    for (std::size_t p = 0; p < values.carried.size(); ++p)
      values.counts.push_back(random_.below(3));
  return facts;
}

PushFacts Worker::make_set(Stream& stream, bool initial) {
  PushFacts facts;
  facts.snapshot_foreign = stream.snapshot_foreign;
  facts.flags = store::kPushSet | store::kPushAllParams;
  facts.initial = initial;
  const std::size_t first = initial ? stream.parts.size() - 1 : 0;
  facts.values.resize(stream.parts.size());
  for (std::size_t e = first; e < stream.parts.size(); ++e) {
    const ExpectedShard& shard =
        world_.checker().shard(stream.id, StreamExtent{static_cast<std::uint16_t>(e)});
    facts.extents |= std::uint64_t{1} << e;
    facts.values[e].carried.assign(shard.layout().params().size(), true);
    fill(facts.values[e], shard);
  }
  return facts;
}

void Worker::fill(PushValues& values, const ExpectedShard& shard) {
  values.scalars.reserve(shard.scalar_count());
  for (std::size_t i = 0; i < shard.scalar_count(); ++i)
    values.scalars.push_back(kUnit * (static_cast<double>(random_.below(17)) - 8));
}

Task Worker::set_values(Stream& stream) {
  co_await flush(stream);
  if (stream.plan->rule.planes != 0 && random_.chance(0.5))
    co_await push(stream, make_state_set(stream, false));
  co_await push(stream, make_set(stream, false));
  co_await flush(stream);
}

std::uint64_t Worker::words_left(std::uint64_t count) const noexcept {
  if (dies_at_ == 0 || points_ + count <= dies_at_) return count;
  return dies_at_ > points_ ? dies_at_ - points_ : 0;
}

void Worker::spend(std::uint64_t points) {
  points_ += points;
  if (dies_at_ != 0 && points_ > dies_at_) throw Killed{};
}

Task Worker::write_slots(Stream& stream, const PushFacts& facts) {
  for (std::uint16_t e = 0; e < stream.parts.size(); ++e)
    if ((facts.extents >> e & 1) != 0)
      co_await write_slot(stream, StreamExtent{e}, facts.values[e]);
}

/// Writes what the push carries; everything else in the slot is garbage. Others run meanwhile.
Task Worker::write_slot(Stream& stream, StreamExtent extent, const PushValues& values) {
  const store::ExtentLayout& layout = world_.layout(stream.id, extent);
  const ExpectedShard& shard = world_.checker().shard(stream.id, extent);
  const store::SlotsView& slots = stream.parts[index(extent)].slots;
  const Sequence sequence = stream.queue.next();
  const auto slot = slots.values(sequence);
  for (std::size_t p = 0; p < layout.params().size(); ++p) {
    const store::ParamPlace& place = layout.places()[p];
    const std::uint64_t count = place.scalar_count;
    const std::uint64_t written = words_left(count);
    for (std::uint64_t i = 0; i < written; ++i) {
      const double value = values.carried[p] ? values.scalars[shard.first_scalar(p) + i]
                                             : std::numeric_limits<double>::quiet_NaN();
      std::byte* const at = slot.data() + place.byte_offset + i * storage_bytes(place.storage);
      if (place.storage == Storage::float32) {
        const auto narrow = static_cast<float>(value);
        std::memcpy(at, &narrow, sizeof(narrow));
      } else {
        std::memcpy(at, &value, sizeof(value));
      }
    }
    spend(count);
    if (random_.chance(0.3)) co_await sleep(random_.duration(nanoseconds{0}, nanoseconds{5000}));
  }
  const auto options = slots.options(sequence);
  for (std::size_t p = 0; p < options.size(); ++p) {
    spend(1);
    options[p] = {.kind = raw(store::RuleKind::kSgd),
                  .lr = values.rates.empty() ? 0 : values.rates[p],
                  .momentum = 1,
                  .count = values.counts.empty() ? 0 : values.counts[p]};
    if (!values.carried[p]) options[p].lr = std::numeric_limits<double>::quiet_NaN();
  }
  const auto bitmap = slots.bitmap(sequence);
  for (std::size_t word = 0; word < bitmap.size(); ++word) {
    spend(1);
    bitmap[word] = 0;
    for (std::size_t bit = 0; bit < 64 && word * 64 + bit < values.carried.size(); ++bit)
      if (values.carried[word * 64 + bit]) bitmap[word] |= std::uint64_t{1} << bit;
  }
}

Task Worker::push(Stream& stream, PushFacts facts) {
  co_await wait_for(formatted("waiting for a slot of stream {}", raw(stream.id)),
                    [&] { return stream.queue.slot_is_free(); });
  look_at_acknowledgements(stream);
  co_await write_slots(stream, facts);
  if (random_.chance(0.2)) co_await sleep(random_.duration(nanoseconds{0}, nanoseconds{5000}));
  constexpr std::uint64_t kDescriptorWords = 8;
  if (const std::uint64_t words = words_left(kDescriptorWords); words < kDescriptorWords)
    die_in_descriptor(stream, words);
  spend(kDescriptorWords);
  const Sequence sequence = stream.queue.next();
  const Status published = stream.queue.publish({.flags = facts.flags,
                                                 .extents = facts.extents,
                                                 .lambda = facts.lambda,
                                                 .snapshot_foreign = facts.snapshot_foreign,
                                                 .epoch = epoch_,
                                                 .layout_version = layout_version_});
  if (!published.ok()) {
    if (!stream.queue.closed())
      world_.checker().fail("closed-queue", "a publish was refused, but the queue is not closed");
    throw Failed{};
  }
  const bool is_step = (facts.flags & store::kPushSet) == 0;
  world_.checker().published(stream.id, life(), sequence, std::move(facts));
  if (is_step) {
    ++stream.steps;
    stream.step_sequence.push_back(sequence);
  }
  spend(1);  // dies after it was published, before anybody is told
  ring();
}

/// The first `words` words of a descriptor are stored, then the process ends. The queue itself
/// writes the whole descriptor in one call.
void Worker::die_in_descriptor(Stream& stream, std::uint64_t words) {
  const Sequence sequence = stream.queue.next();
  store::PushDescriptor& d = stream.mail->descriptors[raw(sequence) % store::kSlots];
  if (words > 0) d.sequence.store(raw(sequence), std::memory_order_relaxed);
  if (words > 1) d.epoch.store(raw(epoch_), std::memory_order_relaxed);
  if (words > 2) d.incarnation.store(raw(incarnation_), std::memory_order_relaxed);
  if (words > 3) d.flags.store(store::kPushAllParams, std::memory_order_relaxed);
  if (words > 4) d.layout_version.store(layout_version_, std::memory_order_relaxed);
  if (words > 5) d.extents.store(1, std::memory_order_relaxed);
  if (words > 6) d.lambda.store(store::to_word(1.0), std::memory_order_relaxed);
  throw Killed{};
}

void Worker::look_at_acknowledgements(Stream& stream) {
  const std::uint64_t applied = raw(stream.queue.applied());
  while (stream.acknowledged < applied) {
    const Sequence sequence{++stream.acknowledged};
    world_.checker().saw_applied(stream.id, life(), sequence, stream.queue.staleness_of(sequence));
  }
}

}  // namespace psplus::sim
