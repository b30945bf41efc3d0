#include "store/shard.hpp"

#include <algorithm>
#include <cstring>

#include "base/format.hpp"
#include "kernels/relaxed_copy.hpp"

namespace psplus::store {
namespace {

struct Offsets {
  std::size_t layout;
  std::size_t table;
  std::size_t pool;
  std::size_t end;
};

Offsets offsets_of(std::size_t layout_bytes, std::size_t chunks, std::size_t unit_bytes) {
  Offsets at{};
  at.layout = sizeof(ShardHeader);
  at.table = round_up(at.layout + layout_bytes, 64);
  at.pool = round_up(at.table + chunks * sizeof(Word), kPageBytes);
  at.end = at.pool + (chunks + kSpareUnits) * unit_bytes;
  return at;
}

std::size_t count_bytes_of(const ExtentLayout& layout, Rule rule) {
  return rule.planes == 0 ? 0 : round_up(layout.most_params_in_a_chunk() * sizeof(Word), 64);
}

std::size_t unit_bytes_of(const ExtentLayout& layout, Rule rule) {
  return layout.chunk_bytes() * (1 + rule.planes) + count_bytes_of(layout, rule);
}

}  // namespace

std::size_t ShardView::segment_bytes(const ExtentLayout& layout, Rule rule) noexcept {
  return offsets_of(layout.serialize().size(), layout.chunk_count(), unit_bytes_of(layout, rule))
      .end;
}

void ShardView::format(std::span<std::byte> bytes, const ExtentLayout& layout, Rule rule) {
  const auto blob = layout.serialize();
  const auto at = offsets_of(blob.size(), layout.chunk_count(), unit_bytes_of(layout, rule));
  auto& header = *reinterpret_cast<ShardHeader*>(bytes.data());
  header.layout_offset = at.layout;
  header.layout_bytes = blob.size();
  header.table_offset = at.table;
  header.pool_offset = at.pool;
  header.unit_bytes = unit_bytes_of(layout, rule);
  header.rule_kind = raw(rule.kind);
  header.planes = rule.planes;
  header.count_bytes = count_bytes_of(layout, rule);
  header.chunk_count = layout.chunk_count();
  header.unit_count = layout.chunk_count() + kSpareUnits;
  std::memcpy(bytes.data() + at.layout, blob.data(), blob.size());
  const ShardView view{bytes};
  for (std::uint32_t c = 0; c < layout.chunk_count(); ++c)
    view.entry(ChunkIndex{c})
        .store(ChunkEntry{BatchId{0}, UnitIndex{c}}.pack(), std::memory_order_relaxed);
}

Status ShardView::check() const {
  const Status damaged{StatusCode::kInternal, "a shard segment is damaged"};
  if (bytes_.size() < sizeof(ShardHeader)) return damaged;
  const ShardHeader& h = header();
  if (h.unit_bytes == 0 || h.unit_bytes % 64 != 0 || h.unit_bytes > bytes_.size() ||
      h.unit_count > ChunkEntry::kMaxUnits || h.chunk_count + kSpareUnits != h.unit_count ||
      h.layout_bytes > bytes_.size())
    return damaged;
  if (h.rule_kind > raw(RuleKind::kAdagrad) || h.planes > kMaxPlanes || !rule().is_valid() ||
      (h.planes == 0 && h.count_bytes != 0) || h.count_bytes >= h.unit_bytes ||
      (h.unit_bytes - h.count_bytes) % (64 * (1 + h.planes)) != 0)
    return damaged;
  const auto at = offsets_of(h.layout_bytes, h.chunk_count, h.unit_bytes);
  if (at.layout != h.layout_offset || at.table != h.table_offset || at.pool != h.pool_offset ||
      at.end > bytes_.size())
    return damaged;
  for (std::uint32_t c = 0; c < h.chunk_count; ++c) {
    const auto now = ChunkEntry::unpack(entry(ChunkIndex{c}).load(std::memory_order_acquire));
    if (raw(now.unit) >= h.unit_count) return damaged;
  }
  return {};
}

bool ShardView::fits(const ExtentLayout& layout) const noexcept {
  return layout.chunk_count() == header().chunk_count && layout.chunk_bytes() == chunk_bytes() &&
         count_bytes_of(layout, rule()) == header().count_bytes;
}

Result<BatchId> ShardView::read_chunk(ChunkIndex chunk, std::span<std::byte> out,
                                      std::uint64_t* retries, int max_tries) const {
  const Word& word = entry(chunk);
  for (int attempt = 0; attempt < max_tries; ++attempt) {
    const std::uint64_t before = word.load(std::memory_order_acquire);  // pairs with P1
    const auto now = ChunkEntry::unpack(before);
    kernels::copy_words_relaxed(unit(now.unit), out.data(), out.size());
    std::atomic_thread_fence(std::memory_order_acquire);  // pairs with P2
    if (word.load(std::memory_order_relaxed) == before) return now.batch;
    if (retries != nullptr) ++*retries;
  }
  return busy(chunk, max_tries);
}

Status ShardView::busy(ChunkIndex chunk, int tries) {
  return {StatusCode::kBusy,
          formatted("chunk {} changed during each of {} reads", raw(chunk), tries)};
}

Result<FreeUnits> FreeUnits::derive(const ShardView& shard) {
  const ShardHeader& header = shard.header();
  std::vector<bool> used(header.unit_count, false);
  for (std::uint32_t c = 0; c < header.chunk_count; ++c) {
    const auto now = ChunkEntry::unpack(shard.entry(ChunkIndex{c}).load(std::memory_order_acquire));
    if (raw(now.unit) >= header.unit_count || used[index(now.unit)])
      return Status{StatusCode::kInternal,
                    formatted("chunk {} names unit {}, which is taken", c, raw(now.unit))};
    used[index(now.unit)] = true;
  }
  FreeUnits free;
  for (std::uint32_t u = 0; u < header.unit_count; ++u)
    if (!used[u]) free.units_.push_back(UnitIndex{u});
  return free;
}

}  // namespace psplus::store
