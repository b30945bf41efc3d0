#include "runtime/sim/checker.hpp"

#include "base/format.hpp"

#include <algorithm>

namespace psplus::sim {
namespace {

template <class T>
T peek(const std::atomic<T>& word) {
  return word.load(std::memory_order_acquire);
}

}  // namespace

Checker::Checker(const Scenario& scenario) : scenario_(scenario) {
  for (const StreamPlan& plan : scenario.streams) {
    Stream& stream = streams_.emplace_back();
    for (const auto& params : plan.extents)
      stream.shards.emplace_back(store::ExtentLayout{params, scenario.chunk_bytes},
                                 plan.rule.steps());
  }
}

void Checker::begin(store::SegmentHandle control) {
  if (pushes_published_ > 0)
    return fail("protocol", "a server serves another job than the one that pushes were made in");
  control_segment_ = std::move(control);
  control_ = reinterpret_cast<const store::ControlBlock*>(control_segment_.bytes.data());
  last_state_ = {};
  for (Stream& stream : streams_) stream.state = {}, stream.barriers = 0;
}

void Checker::fail(std::string_view rule, std::string text) {
  if (!violation_) violation_ = Violation{std::string{rule}, std::move(text)};
}

void Checker::joined(StreamId stream, LifeId life, const store::MailStream& mail,
                     std::uint64_t barriers) {
  Life& entry = streams_[index(stream)].lives[life];
  entry.mail = &mail;
  entry.arrived = std::max(entry.arrived, barriers);
}

void Checker::left(StreamId stream, LifeId life) {
  const auto found = streams_[index(stream)].lives.find(life);
  if (found != streams_[index(stream)].lives.end()) found->second.mail = nullptr;
}

void Checker::published(StreamId id, LifeId life, Sequence sequence, PushFacts facts) {
  Stream& stream = streams_[index(id)];
  Life& entry = stream.lives[life];
  if (raw(sequence) != entry.pushes.size() + 1)
    return fail("order",
                formatted("push {} was published after {}", raw(sequence), entry.pushes.size()));
  const bool step = (facts.flags & store::kPushSet) == 0;
  entry.pushes.push_back({.facts = std::move(facts), .batch = {}, .staleness = 0});
  ++pushes_published_;
  const std::uint64_t bound = scenario_.streams[index(id)].bound;
  if (bound == store::kNoBound || !step) return;
  // Its own clock, had everything that it published been applied.
  std::uint64_t clock = stream.now.clock[index(life.member)];
  for (std::uint64_t s = entry.applied; s < entry.pushes.size(); ++s)
    if ((entry.pushes[s].facts.flags & store::kPushSet) == 0) ++clock;
  clock += credit(id, index(life.member));
  if (const auto least = least_clock(id, index(life.member)); least && clock > *least + bound + 1)
    fail("bound", formatted("member {} publishes step {} on stream {} while another is at {}; the "
                            "bound is {}",
                            raw(life.member), clock, raw(id), *least, bound));
}

void Checker::saw_applied(StreamId id, LifeId life, Sequence sequence, std::uint64_t staleness) {
  if (violation_) return;
  Stream& stream = streams_[index(id)];
  const Life& entry = stream.lives[life];
  const auto found = formatted("member {} sees push {} on stream {} applied", raw(life.member),
                               raw(sequence), raw(id));
  if (raw(sequence) > entry.applied)
    return fail("own-push",
                formatted("{}, but the last one in a batch is {}", found, entry.applied));
  const Push& push = entry.pushes[raw(sequence) - 1];
  const auto state = store::RecordState::unpack(peek(control_->record.state));
  if (state.batch < push.batch || (state.batch == push.batch && state.open))
    return fail("own-push",
                formatted("{}, but its batch {} is not closed", found, raw(push.batch)));
  const store::StreamMember& words = control_->streams[index(id)].members[index(life.member)];
  const auto dedup = store::PushMark::unpack(peek(words.dedup));
  if (dedup.incarnation != life.incarnation || dedup.sequence < sequence)
    return fail("own-push", formatted("{}, but its counters are not there yet", found));
  if (staleness != push.staleness)
    fail("staleness",
         formatted("{} with staleness {}, expected {}", found, staleness, push.staleness));
}

void Checker::saw_released(StreamId id, LifeId life, std::uint64_t clock) {
  const std::uint64_t bound = scenario_.streams[index(id)].bound;
  if (bound == store::kNoBound || violation_) return;
  clock += credit(id, index(life.member));
  const auto least = least_clock(id, index(life.member));
  if (least && clock > *least + bound)
    fail("bound", formatted("member {} has its reply to step {} on stream {} while another is at "
                            "{}; the bound is {}",
                            raw(life.member), clock, raw(id), *least, bound));
}

void Checker::arrived(StreamId stream, LifeId life, std::uint64_t barrier) {
  streams_[index(stream)].lives[life].arrived = barrier;
}

void Checker::passed(StreamId id, std::uint64_t barrier) {
  for (const auto& [life, entry] : streams_[index(id)].lives) {
    if (entry.mail == nullptr || entry.arrived >= barrier) continue;
    if ((peek(entry.mail->published) & store::PushMark::kClosed) != 0) continue;  // expelled
    return fail("barrier", formatted("barrier {} of stream {} opened without member {}", barrier,
                                     raw(id), raw(life.member)));
  }
}

BatchId Checker::contained_in(StreamId id, const worker::StepVector& vector) {
  const Stream& stream = streams_[index(id)];
  BatchId least{0};
  for (std::size_t m = 0; m < kTracked; ++m) {
    const std::uint64_t pushes = vector.pushes[m];
    if (pushes == 0) continue;
    if (pushes > stream.batch_of_push[m].size()) {
      fail("counters", formatted("a step vector counts {} pushes of member {}, there are {}",
                                 pushes, m, stream.batch_of_push[m].size()));
      return least;
    }
    least = std::max(least, stream.batch_of_push[m][pushes - 1]);
  }
  return least;
}

BatchId Checker::batch_of(StreamId stream, LifeId life, Sequence sequence) const {
  const auto& lives = streams_[index(stream)].lives;
  const auto found = lives.find(life);
  if (raw(sequence) == 0 || found == lives.end() || raw(sequence) > found->second.pushes.size())
    return BatchId{0};
  return found->second.pushes[raw(sequence) - 1].batch;
}

void Checker::read_chunk(StreamId stream, StreamExtent extent, ChunkIndex chunk, BatchId batch,
                         std::span<const std::byte> bytes, BatchId at_least) {
  if (violation_) return;
  const ExpectedShard& shard = streams_[index(stream)].shards[index(extent)];
  if (auto wrong = shard.compare(chunk, batch, bytes)) return fail("contents", *wrong);
  if (const BatchId needed = shard.last_change(chunk, at_least); batch < needed)
    fail("own-push", formatted("chunk {} of extent {} of stream {} was read as batch {} left it, "
                               "but batch {} was promised",
                               raw(chunk), raw(extent), raw(stream), raw(batch), raw(needed)));
}

void Checker::read_cut(StreamId id, MemberId reader, std::span<const store::PullView> views,
                       std::size_t buffer, BatchId at_least) {
  if (violation_) return;
  const Stream& stream = streams_[index(id)];
  const store::PullHeader::Cut& cut = views.front().header().cuts[buffer];
  const BatchId batch{peek(cut.batch)};
  if (batch < at_least)
    return fail("cut",
                formatted("member {} got a cut at batch {}, which lacks its push in batch {}",
                          raw(reader), raw(batch), raw(at_least)));
  for (std::size_t e = 0; e < views.size(); ++e) {
    const ExpectedShard& shard = stream.shards[e];
    if (const BatchId own{peek(views[e].header().cuts[buffer].batch)}; own != batch)
      return fail("cut", formatted("a cut is at batch {} of extent 0 and at batch {} of extent {}",
                                   raw(batch), raw(own), e));
    const std::size_t bytes = shard.layout().chunk_bytes();
    for (std::uint32_t c = 0; c < shard.layout().chunk_count(); ++c) {
      const ChunkIndex chunk{c};
      if (auto wrong = shard.compare(chunk, shard.last_change(chunk, batch),
                                     views[e].values(buffer).subspan(c * bytes, bytes)))
        return fail("cut", formatted("a cut at batch {}, extent {}: {}", raw(batch), e, *wrong));
    }
  }
  const auto after =
      std::upper_bound(stream.history.begin(), stream.history.end(), batch,
                       [](BatchId b, const Counters& counters) { return b < counters.batch; });
  const Counters expected = after == stream.history.begin() ? Counters{} : *std::prev(after);
  if (peek(cut.total_pushes) != expected.total)
    return fail("cut", formatted("a cut at batch {} counts {} steps, expected {}", raw(batch),
                                 peek(cut.total_pushes), expected.total));
  for (std::size_t m = 0; m < kTracked; ++m)
    if (peek(cut.pushes[m]) != expected.pushes[m])
      return fail("cut", formatted("a cut at batch {} counts {} pushes of member {}, expected {}",
                                   raw(batch), peek(cut.pushes[m]), m, expected.pushes[m]));
}

void Checker::stopped(std::size_t present) {
  if (present != 0)
    fail("stop", formatted("the server ended although {} workers were attached", present));
}

void Checker::finish(StreamId id) {
  if (violation_) return;
  const Stream& stream = streams_[index(id)];
  for (const auto& [life, entry] : stream.lives)
    if (entry.applied != entry.pushes.size())
      return fail("exactly-once",
                  formatted("member {}, life {} published {} pushes on stream {}, {} were applied",
                            raw(life.member), raw(life.incarnation), entry.pushes.size(), raw(id),
                            entry.applied));
  const store::StreamEntry& words = control_->streams[index(id)];
  if (peek(words.total_pushes) != stream.now.total)
    return fail("counters", formatted("stream {} ends with {} steps, expected {}", raw(id),
                                      peek(words.total_pushes), stream.now.total));
  for (std::size_t m = 0; m < kTracked; ++m)
    if (peek(words.members[m].pushes) != stream.now.pushes[m])
      return fail("counters", formatted("member {} ends with {} pushes, expected {}", m,
                                        peek(words.members[m].pushes), stream.now.pushes[m]));
}

void Checker::finish(StreamId id, StreamExtent extent, const store::ShardView& view) {
  if (violation_) return;
  const ExpectedShard& shard = streams_[index(id)].shards[index(extent)];
  std::vector<std::byte> bytes(view.header().unit_bytes);
  for (std::uint32_t c = 0; c < shard.layout().chunk_count(); ++c) {
    const auto batch = view.read_chunk(ChunkIndex{c}, bytes);
    if (!batch.ok()) return fail("contents", batch.status().message());
    const BatchId newest = shard.last_change(ChunkIndex{c}, last_state_.batch);
    if (*batch != newest)
      return fail("contents",
                  formatted("chunk {} of extent {} of stream {} ends at batch {}, expected {}", c,
                            raw(extent), raw(id), raw(*batch), raw(newest)));
    if (auto wrong = shard.compare(ChunkIndex{c}, *batch, bytes)) return fail("contents", *wrong);
  }
}

double Checker::mean_staleness(StreamId stream, std::uint64_t skip) const {
  double sum = 0;
  double count = 0;
  for (const auto& [life, entry] : streams_[index(stream)].lives)
    for (std::uint64_t s = skip; s < entry.applied; ++s) {
      if ((entry.pushes[s].facts.flags & store::kPushSet) != 0) continue;
      sum += static_cast<double>(entry.pushes[s].staleness);
      ++count;
    }
  return count == 0 ? 0 : sum / count;
}

}  // namespace psplus::sim
