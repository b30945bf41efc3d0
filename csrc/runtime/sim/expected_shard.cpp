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

ExpectedShard::ExpectedShard(store::ExtentLayout layout, bool has_momentum)
    : layout_(std::move(layout)),
      has_momentum_(has_momentum),
      cells_(layout_.chunk_count()),
      versions_(layout_.chunk_count()) {
  for (std::size_t p = 0; p < layout_.params().size(); ++p) {
    const store::ParamPlace& place = layout_.places()[p];
    first_scalar_.push_back(scalar_count_);
    for (std::uint64_t i = 0; i < place.scalar_count; ++i) {
      const std::uint64_t byte = place.byte_offset + i * storage_bytes(place.storage);
      cells_[byte / layout_.chunk_bytes()].push_back(
          {.scalar = scalar_count_++,
           .param = static_cast<std::uint32_t>(p),
           .place = 0,
           .offset = static_cast<std::uint32_t>(byte % layout_.chunk_bytes()),
           .storage = place.storage});
    }
  }
  for (std::size_t c = 0; c < cells_.size(); ++c) {
    // Cells lie in ascending order, a parameter's one after another.
    std::sort(cells_[c].begin(), cells_[c].end(),
              [](const Cell& a, const Cell& b) { return a.offset < b.offset; });
    std::uint32_t place = 0;
    for (std::size_t i = 0; i < cells_[c].size(); ++i) {
      if (i > 0 && cells_[c][i].param != cells_[c][i - 1].param) ++place;
      cells_[c][i].place = place;
    }
    versions_[c].push_back({BatchId{0}, std::vector<double>(cells_[c].size(), 0.0),
                            std::vector<double>(cells_[c].size(), 0.0),
                            std::vector<std::uint64_t>(place + 1, 0)});
  }
}

void ExpectedShard::subtract(BatchId batch, std::span<const Term> terms) {
  for (std::size_t c = 0; c < cells_.size(); ++c) {
    Version next = versions_[c].back();
    bool touched = false;
    for (std::size_t i = 0; i < cells_[c].size(); ++i) {
      const Cell& cell = cells_[c][i];
      for (const Term& term : terms) {
        if (!term.values->carried[cell.param]) continue;
        touched = true;
        next.values[i] -= term.values->scalars[cell.scalar] * term.multiplier / term.divisor;
      }
    }
    next.batch = batch;
    if (touched) versions_[c].push_back(std::move(next));
  }
}

void ExpectedShard::step(BatchId batch, std::span<const Term> terms, bool mean) {
  for (std::size_t c = 0; c < cells_.size(); ++c) {
    const Version before = versions_[c].back();
    Version next = before;
    bool touched = false;
    for (std::size_t i = 0; i < cells_[c].size(); ++i) {
      const Cell& cell = cells_[c][i];
      std::uint64_t count = before.counts[cell.place];
      const auto take = [&](double gradient, double rate) {
        next.buffers[i] = count == 0 ? gradient : next.buffers[i] + gradient;
        next.values[i] -= rate * next.buffers[i];
        ++count;
        touched = true;
      };
      double sum = 0;
      const Term* first = nullptr;
      for (const Term& term : terms) {
        if (!term.values->carried[cell.param]) continue;
        const double gradient = term.values->scalars[cell.scalar];
        if (first == nullptr) first = &term;
        if (mean)
          sum += gradient / term.divisor;
        else
          take(gradient, term.values->rates[cell.param] * term.multiplier / term.divisor);
      }
      if (mean && first != nullptr) take(sum, first->values->rates[cell.param]);
      next.counts[cell.place] = count;
    }
    next.batch = batch;
    if (touched) versions_[c].push_back(std::move(next));
  }
}

void ExpectedShard::replace(BatchId batch, const PushValues& values) {
  for (std::size_t c = 0; c < cells_.size(); ++c) {
    Version next = versions_[c].back();
    next.batch = batch;
    for (std::size_t i = 0; i < cells_[c].size(); ++i)
      next.values[i] = values.scalars[cells_[c][i].scalar];
    if (!cells_[c].empty()) versions_[c].push_back(std::move(next));
  }
}

void ExpectedShard::replace_state(BatchId batch, const PushValues& values) {
  for (std::size_t c = 0; c < cells_.size(); ++c) {
    Version next = versions_[c].back();
    next.batch = batch;
    for (std::size_t i = 0; i < cells_[c].size(); ++i) {
      const Cell& cell = cells_[c][i];
      next.buffers[i] = values.scalars[cell.scalar];
      next.counts[cell.place] = values.counts[cell.param];
    }
    if (!cells_[c].empty()) versions_[c].push_back(std::move(next));
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
  const std::size_t chunk_bytes = layout_.chunk_bytes();
  if (auto wrong = compare_cells(chunk, batch, bytes.first(chunk_bytes), version.values, "scalar"))
    return wrong;
  if (!has_momentum_ || bytes.size() == chunk_bytes) return std::nullopt;
  if (auto wrong = compare_cells(chunk, batch, bytes.subspan(chunk_bytes, chunk_bytes),
                                 version.buffers, "momentum"))
    return wrong;
  for (std::size_t p = 0; p < version.counts.size(); ++p) {
    std::uint64_t found = 0;
    std::memcpy(&found, bytes.data() + 2 * chunk_bytes + p * sizeof(found), sizeof(found));
    if (found != version.counts[p])
      return formatted("chunk {} of batch {}: its parameter {} has taken {} steps, expected {}",
                       raw(chunk), raw(batch), p, found, version.counts[p]);
  }
  return std::nullopt;
}

std::optional<std::string> ExpectedShard::compare_cells(ChunkIndex chunk, BatchId batch,
                                                        std::span<const std::byte> area,
                                                        const std::vector<double>& expected,
                                                        std::string_view what) const {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const Cell& cell = cells_[index(chunk)][i];
    const std::byte* const at = area.data() + cell.offset;
    const double found = cell.storage == Storage::float32 ? load<float>(at) : load<double>(at);
    if (found != expected[i])
      return formatted("chunk {} of batch {}: {} {} of parameter {} is {}, expected {}", raw(chunk),
                       raw(batch), what, cell.scalar - first_scalar_[cell.param], cell.param, found,
                       expected[i]);
  }
  return std::nullopt;
}

}  // namespace psplus::sim
