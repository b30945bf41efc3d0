// What a checker makes of the server's words: registrations, records opened and closed.

#include "base/format.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/sim/checker.hpp"

namespace psplus::sim {
namespace {

using store::BatchKind;
using store::MemberState;
using store::StreamMemberState;

template <class T>
T peek(const std::atomic<T>& word) {
  return word.load(std::memory_order_acquire);
}

std::string name_of(LifeId life, std::uint64_t sequence) {
  return formatted("push {} of member {}, life {}", sequence, raw(life.member),
                   raw(life.incarnation));
}

/// What a push of an asynchronous batch is divided by.
double divisor_of(const PushFacts& facts, std::uint32_t workers) {
  return (facts.flags & store::kPushUndivided) != 0 ? 1.0 : static_cast<double>(workers);
}

}  // namespace

void Checker::observe() {
  if (control_ == nullptr || violation_) return;
  watch_registrations();
  watch_barriers();
  const auto state = store::RecordState::unpack(peek(control_->record.state));
  if (state.batch == last_state_.batch && state.open == last_state_.open) return;
  if (state.open) {
    if (last_state_.open)
      return fail("record", formatted("batch {} was opened while batch {} was open",
                                      raw(state.batch), raw(last_state_.batch)));
    if (raw(state.batch) != raw(last_state_.batch) + 1)
      return fail("record",
                  formatted("batch {} follows batch {}", raw(state.batch), raw(last_state_.batch)));
    opened(state.batch);
  } else {
    if (!last_state_.open || last_state_.batch != state.batch)
      return fail("record",
                  formatted("batch {} was closed, but batch {} was {}", raw(state.batch),
                            raw(last_state_.batch), last_state_.open ? "open" : "closed"));
    closed(state.batch);
  }
  last_state_ = state;
}

void Checker::watch_registrations() {
  for (std::size_t s = 0; s < streams_.size(); ++s) {
    const store::StreamEntry& entry = control_->streams[s];
    if (peek(entry.open) == 0) break;
    for (std::size_t m = 0; m < std::min<std::size_t>(kTracked, scenario_.workers); ++m) {
      const auto state = static_cast<StreamMemberState>(peek(entry.members[m].state));
      StreamMemberState& known = streams_[s].state[m];
      if (state == known) continue;
      known = state;
      if (state == StreamMemberState::kRegistered)
        registered(StreamId{static_cast<std::uint16_t>(s)},
                   MemberId{static_cast<std::uint16_t>(m)});
    }
  }
}

/// Who leaves a barrier leaves it with all others, at one gate clock. Credits are taken from the
/// server's words; this is what they must achieve.
void Checker::watch_barriers() {
  for (std::size_t s = 0; s < streams_.size(); ++s) {
    const StreamId id{static_cast<std::uint16_t>(s)};
    const store::StreamEntry& entry = control_->streams[s];
    const std::uint64_t opened = peek(entry.barriers);
    if (opened == streams_[s].barriers) continue;
    if (opened != streams_[s].barriers + 1)
      return fail("barrier", formatted("barrier {} of stream {} follows barrier {}", opened, s,
                                       streams_[s].barriers));
    streams_[s].barriers = opened;
    std::optional<std::uint64_t> level;
    for (std::size_t m = 0; m < kTracked; ++m) {
      if (!is_active(id, m)) continue;
      const std::uint64_t clock = peek(entry.members[m].clock) + credit(id, m);
      if (level && clock != *level)
        return fail("barrier", formatted("barrier {} of stream {} lets members go at {} and {}",
                                         opened, s, *level, clock));
      level = clock;
    }
  }
}

/// A joiner enters at the least clock of those that can step, as the batch that is open will leave
/// them, at the greatest if all stand at a barrier, or where its rank stood before; a worker that
/// the job began with counted before it registered, at its own clock.
void Checker::registered(StreamId id, MemberId member) {
  Stream& stream = streams_[index(id)];
  const std::uint64_t clock = peek(control_->streams[index(id)].members[index(member)].clock);
  const std::uint64_t own = stream.now.clock[index(member)];
  std::optional<std::uint64_t> least;
  std::optional<std::uint64_t> greatest;
  for (std::size_t m = 0; m < kTracked; ++m) {
    if (m == index(member) || !is_active(id, m)) continue;
    const std::uint64_t other = stream.now.clock[m] + credit(id, m);
    greatest = std::max(other, greatest.value_or(other));
    if (can_step(id, m)) least = std::min(other, least.value_or(other));
  }
  if (!least) least = greatest;
  std::uint64_t expected = least.value_or(own);
  if (peek(control_->members[index(member)].founder) == 1) expected = std::min(expected, own);
  // Alone, it may also enter where a registration that a dead server did not finish had put it.
  if (clock != expected && (least || clock < own))
    return fail("join", formatted("member {} joins stream {} at clock {}, expected {}", raw(member),
                                  raw(id), clock, expected));
  stream.now.clock[index(member)] = clock;
}

bool Checker::is_active(StreamId stream, std::size_t member) const {
  const store::MemberEntry& entry = control_->members[member];
  if (static_cast<MemberState>(peek(entry.state)) != MemberState::kLive) return false;
  const auto state =
      static_cast<StreamMemberState>(peek(control_->streams[index(stream)].members[member].state));
  return state == StreamMemberState::kRegistered ||
         (state == StreamMemberState::kAbsent && peek(entry.founder) == 1);
}

std::uint32_t Checker::active_count(StreamId stream) const {
  std::uint32_t count = 0;
  for (std::size_t m = 0; m < kTracked; ++m)
    if (is_active(stream, m)) ++count;
  return count;
}

bool Checker::can_step(StreamId stream, std::size_t member) const {
  const store::StreamEntry& entry = control_->streams[index(stream)];
  const std::uint64_t opened = peek(entry.barriers);
  if (peek(entry.members[member].barrier_arrived) <= opened) return true;
  const Incarnation incarnation{
      static_cast<std::uint16_t>(peek(control_->members[member].incarnation))};
  const auto& lives = streams_[index(stream)].lives;
  const auto found = lives.find({MemberId{static_cast<std::uint16_t>(member)}, incarnation});
  return found == lives.end() || found->second.arrived <= opened;
}

std::uint64_t Checker::credit(StreamId stream, std::size_t member) const {
  return peek(control_->streams[index(stream)].members[member].credit);
}

std::optional<std::uint64_t> Checker::least_clock(StreamId stream, std::size_t without) const {
  std::optional<std::uint64_t> least;
  for (std::size_t m = 0; m < kTracked; ++m) {
    if (m == without || !is_active(stream, m) || !can_step(stream, m)) continue;
    const std::uint64_t clock =
        peek(control_->streams[index(stream)].members[m].clock) + credit(stream, m);
    if (!least || clock < *least) least = clock;
  }
  return least;
}

/// The record must be whole now: whoever takes over may have nothing else.
void Checker::opened(BatchId batch) {
  const store::BatchRecord& record = control_->record;
  const std::uint32_t s = peek(record.stream);
  const std::uint32_t count = peek(record.count);
  const auto kind = static_cast<BatchKind>(peek(record.kind));
  if (s >= streams_.size() || count == 0 || count > store::kMaxBatchPushes)
    return fail("record", formatted("batch {} has {} pushes on stream {}", raw(batch), count, s));
  open_stream_ = StreamId{static_cast<std::uint16_t>(s)};
  Stream& stream = streams_[s];
  const StreamPlan& plan = scenario_.streams[s];
  const BatchKind expected_kind =
      plan.mode() == store::Mode::kBsp ? BatchKind::kMean : BatchKind::kAdd;
  if (kind != BatchKind::kSet && kind != expected_kind)
    return fail("record", formatted("batch {} is of kind {}", raw(batch), peek(record.kind)));
  if (kind == BatchKind::kAdd && count > scenario_.config.max_batch_pushes)
    return fail("record", formatted("batch {} has {} pushes", raw(batch), count));

  open_pushes_.clear();
  const std::uint32_t workers = std::max(1U, active_count(open_stream_));
  for (std::uint32_t i = 0; i < count; ++i)
    if (!include(stream, batch, record.entries[i], kind, workers)) return;
  if (kind == BatchKind::kMean) check_step_members(open_stream_, open_pushes_);
  if (peek(record.after_total) != stream.now.total)
    return fail("counters", formatted("batch {} shall leave {} steps in all, expected {}",
                                      raw(batch), peek(record.after_total), stream.now.total));
  stream.now.batch = batch;
  stream.history.push_back(stream.now);

  if (kind == BatchKind::kSet) return opened_set(stream, batch);
  if (kind == BatchKind::kMean && store::from_word(peek(record.mean_scale)) != 1.0 / count)
    return fail("scale", formatted("batch {} divides by {} for {} pushes", raw(batch),
                                   1.0 / store::from_word(peek(record.mean_scale)), count));
  for (std::size_t e = 0; e < stream.shards.size(); ++e) {
    std::vector<ExpectedShard::Term> terms;
    for (const Included& included : open_pushes_) {
      const PushFacts& facts = stream.lives.at(included.life).pushes[included.sequence - 1].facts;
      if ((facts.extents >> e & 1) == 0) continue;
      terms.push_back({.values = &facts.values[e],
                       .multiplier = kind == BatchKind::kAdd ? facts.lambda : 1.0,
                       .divisor = kind == BatchKind::kAdd ? divisor_of(facts, workers)
                                                          : static_cast<double>(count)});
    }
    if (!terms.empty() && (stream.initialised >> e & 1) == 0)
      return fail(
          "initial-values",
          formatted("a step was applied to extent {} of stream {} before it had values", e, s));
    if (plan.rule.steps())
      stream.shards[e].step(batch, terms, kind == BatchKind::kMean);
    else
      stream.shards[e].subtract(batch, terms);
  }
}

void Checker::opened_set(Stream& stream, BatchId batch) {
  if (open_pushes_.size() != 1) return fail("record", "a set is not alone in its batch");
  const Included& included = open_pushes_.front();
  const PushFacts& facts = stream.lives.at(included.life).pushes[included.sequence - 1].facts;
  if (facts.initial && (stream.initialised & facts.extents) != 0)
    return fail("initial-values", formatted("extents {:#x} of stream {} were given first values "
                                            "twice",
                                            facts.extents, raw(open_stream_)));
  const bool sets_state = store::set_area(facts.flags) != 0;
  const std::uint64_t initialises = sets_state ? 0 : facts.extents;
  if (peek(control_->record.initialises) != initialises)
    return fail("initial-values",
                formatted("batch {} shall initialise extents {:#x}, expected "
                          "{:#x}",
                          raw(batch), peek(control_->record.initialises), initialises));
  stream.initialised |= initialises;
  for (std::size_t e = 0; e < stream.shards.size(); ++e) {
    if ((facts.extents >> e & 1) == 0) continue;
    if (sets_state)
      stream.shards[e].replace_state(batch, facts.values[e]);
    else
      stream.shards[e].replace(batch, facts.values[e]);
  }
}

/// Takes one entry of a record into the account. @return whether it was right.
bool Checker::include(Stream& stream, BatchId batch, const store::RecordEntry& entry,
                      BatchKind kind, std::uint32_t workers) {
  const LifeId life{MemberId{peek(entry.member)}, Incarnation{peek(entry.incarnation)}};
  const std::uint64_t sequence = peek(entry.sequence);
  const auto wrong = [&](std::string_view rule, std::string what) {
    fail(rule, formatted("batch {}, {}: {}", raw(batch), name_of(life, sequence), what));
    return false;
  };
  const auto found = stream.lives.find(life);
  if (found == stream.lives.end() || sequence == 0 || sequence > found->second.pushes.size())
    return wrong("exactly-once", "it was never published");
  if (sequence <= found->second.applied) return wrong("exactly-once", "it is applied again");
  if (sequence != found->second.applied + 1)
    return wrong("order", formatted("it follows push {}", found->second.applied));
  Push& push = found->second.pushes[sequence - 1];
  const std::size_t m = index(life.member);
  const std::uint64_t foreign = stream.now.total - stream.now.pushes[m];
  push.staleness = foreign - std::min(foreign, push.facts.snapshot_foreign);
  push.batch = batch;
  found->second.applied = sequence;
  if (kind != BatchKind::kSet) {
    ++pushes_applied_;
    ++stream.now.total;
    ++stream.now.clock[m];
    ++stream.now.pushes[m];
    stream.batch_of_push[m].push_back(batch);
  }
  open_pushes_.push_back({life, sequence});

  if (((push.facts.flags & store::kPushSet) != 0) != (kind == BatchKind::kSet))
    return wrong("record", "its batch is of the wrong kind");
  if (peek(entry.flags) != push.facts.flags) return wrong("record", "its flags have changed");
  if (peek(entry.extents) != push.facts.extents) return wrong("record", "it carries other extents");
  if (kind == BatchKind::kAdd &&
      store::from_word(peek(entry.scale)) != push.facts.lambda / divisor_of(push.facts, workers))
    return wrong("scale",
                 formatted("its scale is {}, expected {} / {}", store::from_word(peek(entry.scale)),
                           push.facts.lambda, divisor_of(push.facts, workers)));
  if (peek(entry.after_clock) != stream.now.clock[m] ||
      peek(entry.after_pushes) != stream.now.pushes[m])
    return wrong("counters", formatted("it shall leave clock {} and {} pushes, expected {} and {}",
                                       peek(entry.after_clock), peek(entry.after_pushes),
                                       stream.now.clock[m], stream.now.pushes[m]));
  if (peek(entry.staleness) != push.staleness)
    return wrong("staleness", formatted("its staleness is {}, expected {}", peek(entry.staleness),
                                        push.staleness));
  return true;
}

/// A step holds one push of each worker that can step, and of others only what they left behind.
void Checker::check_step_members(StreamId id, const std::vector<Included>& pushes) {
  for (std::size_t m = 0; m < kTracked; ++m) {
    const auto own = std::count_if(pushes.begin(), pushes.end(), [&](const Included& included) {
      return index(included.life.member) == m;
    });
    if (own > 1 || (own == 0 && is_active(id, m) && can_step(id, m)))
      return fail("bsp", formatted("a step holds {} pushes of member {}", own, m));
  }
  const auto rank = [&](const Included& included) {
    return peek(control_->members[index(included.life.member)].rank);
  };
  if (!std::is_sorted(pushes.begin(), pushes.end(),
                      [&](const Included& a, const Included& b) { return rank(a) < rank(b); }))
    fail("bsp", "a step is not in rank order");
}

void Checker::closed(BatchId batch) {
  const store::StreamEntry& entry = control_->streams[index(open_stream_)];
  const Stream& stream = streams_[index(open_stream_)];
  if (peek(entry.total_pushes) != stream.now.total)
    return fail("counters", formatted("batch {} left {} steps in all, expected {}", raw(batch),
                                      peek(entry.total_pushes), stream.now.total));
  for (const Included& included : open_pushes_) {
    const std::size_t m = index(included.life.member);
    const store::StreamMember& words = entry.members[m];
    const std::uint64_t applied = stream.lives.at(included.life).applied;
    if (peek(words.clock) != stream.now.clock[m] || peek(words.pushes) != stream.now.pushes[m] ||
        peek(words.dedup) != store::PushMark{included.life.incarnation, Sequence{applied}}.pack())
      return fail("counters",
                  formatted("batch {} left member {} at clock {}, {} pushes, sequence {}; "
                            "expected {}, {}, {}",
                            raw(batch), m, peek(words.clock), peek(words.pushes),
                            raw(store::PushMark::unpack(peek(words.dedup)).sequence),
                            stream.now.clock[m], stream.now.pushes[m], applied));
  }
}

}  // namespace psplus::sim
