#include "server/applier.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.hpp"
#include "kernels/relaxed_copy.hpp"
#include "server/gate.hpp"
#include "server/rule_step.hpp"

namespace psplus::server {
namespace {

using store::BatchKind;
using store::ChunkEntry;
using store::RecordEntry;
using store::RecordState;

// Readers copy a unit while it may be rewritten and discard what they got. The thread sanitizer
// wants both sides of that to be atomic, so its builds write through a scratch buffer.
#if defined(__SANITIZE_THREAD__)
constexpr bool kAtomicUnitWrites = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
constexpr bool kAtomicUnitWrites = true;
#else
constexpr bool kAtomicUnitWrites = false;
#endif
#else
constexpr bool kAtomicUnitWrites = false;
#endif

}  // namespace

void Applier::begin(const Operation& operation) {
  operation_ = operation;
  extent_index_ = 0;
  chunk_ = 0;
  byte_ = 0;
  shard_ = nullptr;
  phase_ = Phase::kChunks;
  if (const auto* const cut = std::get_if<TakeCut>(&operation)) {
    stream_ = cut->stream;
    return;
  }
  const store::BatchRecord& record = context_.control().record;
  batch_ = RecordState::unpack(record.state.load(std::memory_order_acquire)).batch;
  stream_ = StreamId{static_cast<std::uint16_t>(peek(record.stream))};
  kind_ = static_cast<BatchKind>(peek(record.kind));
  mean_scale_ = store::from_word(peek(record.mean_scale));
}

bool Applier::advance(std::size_t budget) {
  if (const auto* const cut = std::get_if<TakeCut>(&*operation_)) return advance_cut(*cut, budget);
  return advance_batch(budget);
}

void Applier::enter_extent() {
  const store::StreamEntry& stream = context_.stream(stream_);
  const ExtentId extent{peek(stream.extents[extent_index_])};
  shard_ = &context_.store.shard(extent);
  chunk_ = 0;
  byte_ = 0;
  pushes_.clear();
  every_push_is_whole_ = true;
  if (!std::holds_alternative<ApplyBatch>(*operation_)) return;
  const store::BatchRecord& record = context_.control().record;
  for (std::uint32_t i = 0; i < peek(record.count); ++i) {
    const RecordEntry& entry = record.entries[i];
    if ((peek(entry.extents) >> extent_index_ & 1) == 0) continue;
    const MemberId member{peek(entry.member)};
    const Sequence sequence{peek(entry.sequence)};
    const bool all = (peek(entry.flags) & store::kPushAllParams) != 0;
    every_push_is_whole_ = every_push_is_whole_ && all;
    pushes_.push_back({.all_params = all,
                       .flags = peek(entry.flags),
                       .scale = store::from_word(peek(entry.scale)),
                       .lent = context_.pushes.borrow(stream_, member, sequence, extent)});
  }
}

bool Applier::carries(const Borrowed& push, std::uint32_t param) const {
  return push.all_params || (push.lent.bitmap[param / 64] >> (param % 64) & 1) != 0;
}

bool Applier::chunk_is_touched(ChunkIndex chunk) const {
  if (every_push_is_whole_) return !pushes_.empty();
  const auto [first, last] = shard_->layout.params_of_chunk(chunk);
  const auto order = shard_->layout.order().subspan(first, last - first);
  return std::any_of(order.begin(), order.end(), [&](std::uint32_t param) {
    return std::any_of(pushes_.begin(), pushes_.end(),
                       [&](const Borrowed& push) { return carries(push, param); });
  });
}

template <class S>
void Applier::apply_range(std::size_t begin, std::size_t end,
                          const std::vector<const Borrowed*>& terms) {
  const std::size_t chunk_start = static_cast<std::size_t>(chunk_) * shard_->layout.chunk_bytes();
  const auto now = ChunkEntry::unpack(peek(shard_->view.entry(ChunkIndex{chunk_})));
  const auto* const source = reinterpret_cast<const S*>(shard_->view.unit(now.unit) + begin);
  std::byte* const unit = shard_->view.unit(shard_->free.spare(0)) + begin;
  const std::size_t count = (end - begin) / sizeof(S);
  thread_local std::vector<S> scratch;
  S* target = reinterpret_cast<S*>(unit);
  if constexpr (kAtomicUnitWrites) {
    scratch.resize(count);
    target = scratch.data();
  }
  const auto values = [&](const Borrowed& push) {
    return reinterpret_cast<const S*>(push.lent.values.data() + chunk_start + begin);
  };
  const kernels::StorageKernels<S>& kernel = kernels::best().of<S>();
  switch (kind_) {
    case BatchKind::kAdd: {
      thread_local std::vector<kernels::PushTerm<S>> list;
      list.clear();
      for (const Borrowed* push : terms)
        list.push_back({values(*push), static_cast<S>(push->scale)});
      kernel.apply(target, source, list.data(), list.size(), count);
      break;
    }
    case BatchKind::kMean: {
      thread_local std::vector<const S*> list;
      list.clear();
      for (const Borrowed* push : terms) list.push_back(values(*push));
      kernel.apply_mean(target, source, list.data(), list.size(), static_cast<S>(mean_scale_),
                        count);
      break;
    }
    case BatchKind::kSet:
      std::memcpy(target, terms.empty() ? source : values(*terms.front()), end - begin);
      break;
  }
  if constexpr (kAtomicUnitWrites) kernels::store_words_relaxed(scratch.data(), unit, end - begin);
}

const std::byte* Applier::current_unit() const {
  return shard_->view.unit(ChunkEntry::unpack(peek(shard_->view.entry(ChunkIndex{chunk_}))).unit);
}

template <class S>
void Applier::step_range(std::size_t begin, std::size_t end,
                         const std::vector<const Borrowed*>& terms, std::uint32_t param,
                         std::size_t place) {
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const store::ShardView& view = shard_->view;
  const store::Rule rule = view.rule();
  const std::size_t chunk_bytes = shard_->layout.chunk_bytes();
  const std::size_t first = chunk_ * chunk_bytes + begin;
  const std::byte* const source = current_unit();
  std::byte* const unit = view.unit(shard_->free.spare(0));
  const std::size_t bytes = end - begin;
  thread_local std::vector<Line> scratch;
  const std::size_t lines = (bytes + sizeof(Line) - 1) / sizeof(Line);
  if constexpr (kAtomicUnitWrites) scratch.resize(lines * (1 + rule.planes));
  std::byte* areas[1 + store::kMaxPlanes] = {};
  for (std::size_t a = 0; a <= rule.planes; ++a) {
    areas[a] = unit + a * chunk_bytes + begin;
    if constexpr (kAtomicUnitWrites) areas[a] = scratch[a * lines].bytes;
    std::memcpy(areas[a], source + a * chunk_bytes + begin, bytes);
  }
  if (!terms.empty() && kind_ == BatchKind::kSet) {
    const std::uint32_t area = store::set_area(terms.front()->flags);
    std::memcpy(areas[area], terms.front()->lent.values.data() + first, bytes);
  } else if (!terms.empty()) {
    thread_local std::vector<GradientTerm<S>> gradients;
    gradients.clear();
    for (const Borrowed* push : terms)
      gradients.push_back({.gradient = reinterpret_cast<const S*>(push->lent.values.data() + first),
                           .options = &push->lent.options[param],
                           .scale = push->scale});
    std::uint64_t count = 0;
    if (rule.planes != 0)
      std::memcpy(&count, source + view.counts_offset() + place * sizeof(count), sizeof(count));
    StepTarget<S> target{.values = reinterpret_cast<S*>(areas[0]), .planes = {}};
    for (std::size_t p = 0; p < rule.planes; ++p)
      target.planes[p] = reinterpret_cast<S*>(areas[1 + p]);
    take_steps<S>(kind_, rule, gradients, mean_scale_, count, target, bytes / sizeof(S));
  }
  if constexpr (kAtomicUnitWrites)
    for (std::size_t a = 0; a <= rule.planes; ++a)
      kernels::store_words_relaxed(areas[a], unit + a * chunk_bytes + begin, bytes);
}

/// Counts come last: until the chunk is flipped its steps are taken from those it has now.
void Applier::write_counts() {
  const store::ShardView& view = shard_->view;
  const store::Rule rule = view.rule();
  if (rule.planes == 0) return;
  context_.store.before_write();
  thread_local std::vector<std::uint64_t> counts;
  counts.resize(view.header().count_bytes / sizeof(std::uint64_t));
  std::memcpy(counts.data(), current_unit() + view.counts_offset(), view.header().count_bytes);
  const auto [first, last] = shard_->layout.params_of_chunk(ChunkIndex{chunk_});
  thread_local std::vector<const store::StepOptions*> options;
  for (std::uint32_t i = first; i < last; ++i) {
    const std::uint32_t param = shard_->layout.order()[i];
    std::uint64_t& count = counts[i - first];
    options.clear();
    for (const Borrowed& push : pushes_)
      if (carries(push, param)) options.push_back(&push.lent.options[param]);
    if (kind_ != BatchKind::kSet)
      count = count_after(kind_, rule, options, count);
    else if (!options.empty() && store::set_area(pushes_.front().flags) != 0)
      count = options.front()->count;
  }
  kernels::store_words_relaxed(counts.data(),
                               view.unit(shard_->free.spare(0)) + view.counts_offset(),
                               view.header().count_bytes);
}

std::size_t Applier::apply_piece() {
  context_.store.before_write();
  const store::ExtentLayout& layout = shard_->layout;
  const ChunkIndex chunk{chunk_};
  const std::size_t chunk_start = index(chunk) * layout.chunk_bytes();
  std::size_t end = std::min(layout.chunk_bytes(), byte_ + context_.config.piece_bytes);
  thread_local std::vector<const Borrowed*> terms;
  terms.clear();
  std::uint32_t param_here = 0;
  std::size_t place_here = 0;
  if (every_push_is_whole_ && !steps()) {
    for (const Borrowed& push : pushes_) terms.push_back(&push);
  } else {
    // Up to the next boundary between parameters; what lies between two of them is padding.
    const auto [first, last] = layout.params_of_chunk(chunk);
    const std::size_t here = chunk_start + byte_;
    for (std::uint32_t i = first; i < last; ++i) {
      const std::uint32_t param = layout.order()[i];
      const store::ParamPlace& place = layout.places()[param];
      if (store::round_up(place.byte_end(), 8) <= here) continue;
      if (place.byte_offset > here) {
        end = std::min<std::size_t>(end, place.byte_offset - chunk_start);
      } else {
        // With the padding up to the next whole word, which the atomic writes below need.
        end = std::min<std::size_t>(end, store::round_up(place.byte_end(), 8) - chunk_start);
        for (const Borrowed& push : pushes_)
          if (carries(push, param)) terms.push_back(&push);
        param_here = param;
        place_here = i - first;
      }
      break;
    }
  }
  const std::size_t begin = std::exchange(byte_, end);
  with_storage(layout.storage_of_chunk(chunk), [&]<class S>(S) {
    if (steps())
      step_range<S>(begin, end, terms, param_here, place_here);
    else
      apply_range<S>(begin, end, terms);
  });
  return end - begin;
}

void Applier::flip_chunk() {
  const ChunkIndex chunk{chunk_};
  store::Word& entry = shard_->view.entry(chunk);
  const UnitIndex replaced = ChunkEntry::unpack(peek(entry)).unit;
  // P1, release: a reader that sees the entry sees the unit's new contents.
  context_.store.put(entry, ChunkEntry{batch_, shard_->free.spare(0)}.pack(),
                     std::memory_order_release);
  shard_->free.exchange(0, replaced);
  // P2: the entry is seen to have moved before any later write into the unit it left.
  std::atomic_thread_fence(std::memory_order_release);
}

bool Applier::advance_batch(std::size_t budget) {
  std::size_t done = 0;
  while (done < budget) {
    switch (phase_) {
      case Phase::kChunks: {
        if (shard_ == nullptr) {
          if (extent_index_ >= peek(context_.stream(stream_).extent_count)) {
            phase_ = Phase::kCounters;
            break;
          }
          enter_extent();
        }
        if (chunk_ >= shard_->layout.chunk_count() || pushes_.empty()) {
          shard_ = nullptr;
          ++extent_index_;
          break;
        }
        const auto entry = ChunkEntry::unpack(peek(shard_->view.entry(ChunkIndex{chunk_})));
        if (byte_ == 0 && (entry.batch == batch_ || !chunk_is_touched(ChunkIndex{chunk_}))) {
          ++chunk_;
          done += 64;  // a look costs a cache line
          break;
        }
        done += apply_piece();
        if (byte_ == shard_->layout.chunk_bytes()) {
          if (steps()) write_counts();
          flip_chunk();
          ++chunk_;
          byte_ = 0;
        }
        break;
      }
      case Phase::kCounters:
        write_counters();
        phase_ = Phase::kClose;
        break;
      case Phase::kClose:
        // Release: whoever sees the batch closed sees its counters.
        context_.store.put(context_.control().record.state, RecordState{batch_, false}.pack(),
                           std::memory_order_release);
        phase_ = Phase::kAnnounce;
        break;
      case Phase::kAnnounce:
        announce();
        phase_ = Phase::kDone;
        return true;
      case Phase::kDone:
        return true;
    }
  }
  return false;
}

void Applier::write_counters() {
  store::Store& store = context_.store;
  const store::BatchRecord& record = context_.control().record;
  store::StreamEntry& stream = context_.stream(stream_);
  for (std::uint32_t i = 0; i < peek(record.count); ++i) {
    const RecordEntry& entry = record.entries[i];
    const MemberId member{peek(entry.member)};
    const std::uint64_t sequence = peek(entry.sequence);
    store::StreamMember& counters = context_.in_stream(stream_, member);
    store.put(counters.clock, peek(entry.after_clock));
    store.put(counters.pushes, peek(entry.after_pushes));
    store.put(counters.rate, peek(entry.rate));
    store::Acknowledgement& ack =
        store.mail(member, stream_).acknowledgements[sequence % store::kSlots];
    store.put(ack.sequence, sequence);
    store.put(ack.staleness, peek(entry.staleness));
    store.put(counters.dedup,
              store::PushMark{Incarnation{peek(entry.incarnation)}, Sequence{sequence}}.pack());
  }
  store.put(stream.total_pushes, peek(record.after_total));
  for (std::uint32_t e = 0; e < peek(stream.extent_count); ++e)
    if ((peek(record.initialises) >> e & 1) != 0)
      store.put(context_.control().extents[peek(stream.extents[e])].initialised, 1,
                std::memory_order_release);
}

void Applier::announce() {
  const store::BatchRecord& record = context_.control().record;
  const bool initialises = peek(record.initialises) != 0;
  for (std::uint32_t i = 0; i < peek(record.count); ++i) {
    const MemberId member{peek(record.entries[i].member)};
    context_.pushes.release(stream_, member, Sequence{peek(record.entries[i].sequence)});
    context_.emit(Wake{member, stream_});
  }
  if (!initialises) return;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m)
    if (context_.store.has_mailbox(MemberId{m})) context_.emit(Wake{MemberId{m}, stream_});
}

void Applier::announce_all() {
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s) {
    const StreamId stream{s};
    if (peek(context_.stream(stream).open) == 0) continue;
    for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
      const MemberId member{m};
      if (!context_.store.has_mailbox(member)) continue;
      const auto dedup = store::PushMark::unpack(peek(context_.in_stream(stream, member).dedup));
      if (raw(dedup.incarnation) == peek(context_.member(member).incarnation))
        context_.pushes.release(stream, member, dedup.sequence);
      context_.store.put(context_.store.mail(member, stream).barrier_released,
                         peek(context_.stream(stream).barriers), std::memory_order_release);
      context_.emit(Wake{member, stream});
    }
  }
}

bool Applier::advance_cut(const TakeCut& cut, std::size_t budget) {
  const store::StreamEntry& stream = context_.stream(stream_);
  if (!context_.store.has_mailbox(cut.member) ||
      peek(context_.member(cut.member).incarnation) != raw(cut.incarnation)) {
    phase_ = Phase::kDone;  // the worker has gone meanwhile
    return true;
  }
  for (std::size_t done = 0; done < budget;) {
    if (extent_index_ >= peek(stream.extent_count)) break;
    if (shard_ == nullptr) enter_extent();
    const ExtentId extent{peek(stream.extents[extent_index_])};
    const store::PullView pull = context_.store.pull(cut.member, extent);
    if (!pull || chunk_ >= shard_->layout.chunk_count()) {
      if (pull) {
        store::Store& store = context_.store;
        store::PullHeader::Cut& header = pull.header().cuts[cut.buffer];
        store.put(header.batch,
                  raw(RecordState::unpack(peek(context_.control().record.state)).batch));
        store.put(header.total_pushes, peek(stream.total_pushes));
        for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
          store.put(header.clock[m], peek(stream.members[m].clock));
          store.put(header.pushes[m], peek(stream.members[m].pushes));
        }
      }
      shard_ = nullptr;
      ++extent_index_;
      continue;
    }
    context_.store.before_write();
    const std::size_t bytes = shard_->layout.chunk_bytes();
    const auto now = ChunkEntry::unpack(peek(shard_->view.entry(ChunkIndex{chunk_})));
    std::memcpy(pull.values(cut.buffer).data() + chunk_ * bytes, shard_->view.unit(now.unit),
                bytes);
    ++chunk_;
    done += bytes;
  }
  if (extent_index_ < peek(stream.extent_count)) return false;
  store::MailStream& mail = context_.store.mail(cut.member, stream_);
  // Release: whoever sees the reply sees the cut.
  if (cut.releases)
    context_.store.put(mail.released, raw(*cut.releases), std::memory_order_release);
  else
    context_.store.put(mail.cut_done, cut.request, std::memory_order_release);
  context_.emit(Wake{cut.member, stream_});
  phase_ = Phase::kDone;
  return true;
}

}  // namespace psplus::server
