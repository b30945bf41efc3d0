#include "runtime/sim/expected_shard.hpp"

#include "base/format.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace psplus::sim {
namespace {

template <class S>
double load(const std::byte* at) {
  S value;
  std::memcpy(&value, at, sizeof(S));
  return static_cast<double>(value);
}

}  // namespace

ExpectedShard::ExpectedShard(store::ExtentLayout layout)
    : layout_(std::move(layout)), cells_(layout_.chunk_count()), versions_(layout_.chunk_count()) {
  for (std::size_t p = 0; p < layout_.params().size(); ++p) {
    const store::ParamPlace& place = layout_.places()[p];
    first_scalar_.push_back(scalar_count_);
    for (std::uint64_t i = 0; i < place.scalar_count; ++i) {
      const std::uint64_t byte = place.byte_offset + i * storage_bytes(place.storage);
      cells_[byte / layout_.chunk_bytes()].push_back(
          {.scalar = scalar_count_++,
           .param = static_cast<std::uint32_t>(p),
           .offset = static_cast<std::uint32_t>(byte % layout_.chunk_bytes()),
           .storage = place.storage});
    }
  }
  for (std::size_t c = 0; c < cells_.size(); ++c)
    versions_[c].push_back({BatchId{0}, std::vector<double>(cells_[c].size(), 0.0)});
}

void ExpectedShard::subtract(BatchId batch, std::span<const Term> terms) {
  for (std::size_t c = 0; c < cells_.size(); ++c) {
    std::vector<double> values = versions_[c].back().values;
    bool touched = false;
    for (std::size_t i = 0; i < cells_[c].size(); ++i) {
      const Cell& cell = cells_[c][i];
      for (const Term& term : terms) {
        if (!term.values->carried[cell.param]) continue;
        touched = true;
        values[i] -= term.values->scalars[cell.scalar] * term.multiplier / term.divisor;
      }
    }
    if (touched) versions_[c].push_back({batch, std::move(values)});
  }
}

void ExpectedShard::replace(BatchId batch, const PushValues& values) {
  for (std::size_t c = 0; c < cells_.size(); ++c) {
    std::vector<double> after;
    after.reserve(cells_[c].size());
    for (const Cell& cell : cells_[c]) after.push_back(values.scalars[cell.scalar]);
    if (!after.empty()) versions_[c].push_back({batch, std::move(after)});
  }
}

const ExpectedShard::Version& ExpectedShard::at_or_before(ChunkIndex chunk, BatchId batch) const {
  const std::vector<Version>& versions = versions_[index(chunk)];
  const auto after =
      std::upper_bound(versions.begin(), versions.end(), batch,
                       [](BatchId b, const Version& version) { return b < version.batch; });
  return *std::prev(after);
}

BatchId ExpectedShard::last_change(ChunkIndex chunk, BatchId batch) const {
  return at_or_before(chunk, batch).batch;
}

std::optional<std::string> ExpectedShard::compare(ChunkIndex chunk, BatchId batch,
                                                  std::span<const std::byte> bytes) const {
  const Version& version = at_or_before(chunk, batch);
  if (version.batch != batch)
    return formatted("chunk {} claims to be made by batch {}, which did not change it (last: {})",
                     raw(chunk), raw(batch), raw(version.batch));
  for (std::size_t i = 0; i < version.values.size(); ++i) {
    const Cell& cell = cells_[index(chunk)][i];
    const std::byte* const at = bytes.data() + cell.offset;
    const double found = cell.storage == Storage::float32 ? load<float>(at) : load<double>(at);
    if (found != version.values[i])
      return formatted("chunk {} of batch {}: scalar {} of parameter {} is {}, expected {}",
                       raw(chunk), raw(batch), cell.scalar - first_scalar_[cell.param], cell.param,
                       found, version.values[i]);
  }
  return std::nullopt;
}

}  // namespace psplus::sim
