#include "store/layout.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <unordered_set>

#include "base/format.hpp"
#include "store/limits.hpp"
#include "store/words.hpp"
#include "wire/codec.hpp"

namespace psplus::store {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::uint32_t kLayoutVersion = 1;
constexpr std::size_t kMaxDimensions = 64;
constexpr std::size_t kMaxChunkBytes = std::size_t{1} << 30;

std::string describe(const ParamSpec& param) {
  return formatted("{} of shape [{}]", name(param.dtype), joined(param.shape, ", "));
}

}  // namespace

std::uint64_t ParamSpec::element_count() const noexcept {
  std::uint64_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::uint64_t>(size);
  return count;
}

ExtentLayout::ExtentLayout(std::vector<ParamSpec> params, std::size_t chunk_bytes)
    : params_(std::move(params)), chunk_bytes_(chunk_bytes) {
  if (chunk_bytes == 0 || chunk_bytes % kAlignment != 0 || chunk_bytes > kMaxChunkBytes)
    throw std::invalid_argument(
        formatted("chunk_bytes must be a multiple of {} from {} to {}, got {}", kAlignment,
                  kAlignment, kMaxChunkBytes, chunk_bytes));
  std::unordered_set<std::string_view> names;
  for (const ParamSpec& param : params_) {
    if (!names.insert(param.name).second)
      throw std::invalid_argument(formatted("two parameters are named '{}'", param.name));
    double elements = 1;
    for (const std::int64_t size : param.shape) {
      if (size < 0)
        throw std::invalid_argument(formatted("parameter '{}' has a negative size", param.name));
      elements *= static_cast<double>(size);
    }
    if (elements > 0x1p48)
      throw std::invalid_argument(formatted("parameter '{}' is too large", param.name));
  }

  places_.resize(params_.size());
  std::uint64_t end = 0;
  for (const Storage section : {Storage::float32, Storage::float64}) {
    end = round_up(end, chunk_bytes_);
    for (std::size_t i = 0; i < params_.size(); ++i) {
      const ParamSpec& param = params_[i];
      if (storage_of(param.dtype) != section) continue;
      places_[i] = {end, param.element_count() * scalars_per_element(param.dtype), section};
      end = round_up(places_[i].byte_end(), kAlignment);
      if (end / chunk_bytes_ + 16 > ChunkEntry::kMaxUnits)  // room for spare units
        throw std::invalid_argument(formatted(
            "an extent of {} bytes needs more than 2^24 chunks of {} bytes; split the parameters "
            "over several wraps",
            end, chunk_bytes_));
      if (places_[i].scalar_count != 0) order_.push_back(static_cast<std::uint32_t>(i));
    }
    chunk_count_ = static_cast<std::uint32_t>(round_up(end, chunk_bytes_) / chunk_bytes_);
    if (section == Storage::float32) float32_chunks_ = chunk_count_;
  }
}

ExtentLayout::Range ExtentLayout::params_of_chunk(ChunkIndex chunk) const noexcept {
  const std::uint64_t begin = index(chunk) * chunk_bytes_;
  const auto first = std::partition_point(order_.begin(), order_.end(), [&](std::uint32_t i) {
    return places_[i].byte_end() <= begin;
  });
  const auto last = std::partition_point(first, order_.end(), [&](std::uint32_t i) {
    return places_[i].byte_offset < begin + chunk_bytes_;
  });
  return {static_cast<std::uint32_t>(first - order_.begin()),
          static_cast<std::uint32_t>(last - order_.begin())};
}

std::uint32_t ExtentLayout::most_params_in_a_chunk() const noexcept {
  std::uint32_t most = 0;
  for (std::uint32_t c = 0; c < chunk_count_; ++c) {
    const auto [first, last] = params_of_chunk(ChunkIndex{c});
    most = std::max(most, last - first);
  }
  return most;
}

std::vector<std::byte> ExtentLayout::serialize() const {
  wire::Writer writer;
  writer.put(kLayoutVersion);
  writer.put(static_cast<std::uint64_t>(chunk_bytes_));
  writer.put(static_cast<std::uint64_t>(params_.size()));
  for (const ParamSpec& param : params_) {
    writer.put_string(param.name);
    writer.put(param.dtype);
    writer.put(static_cast<std::uint8_t>(param.shape.size()));
    for (const std::int64_t size : param.shape) writer.put(size);
  }
  return writer.take();
}

Result<ExtentLayout> ExtentLayout::parse(std::span<const std::byte> bytes) {
  wire::Reader reader{bytes};
  const auto version = reader.get<std::uint32_t>();
  const auto chunk_bytes = reader.get<std::uint64_t>();
  const auto count = reader.get<std::uint64_t>();
  constexpr std::size_t kSmallestParam = sizeof(std::uint32_t) + 2;
  if (version != kLayoutVersion || !reader.can_hold(count, kSmallestParam))
    return Status{StatusCode::kInternal, "a damaged layout"};
  std::vector<ParamSpec> params(count);
  for (ParamSpec& param : params) {
    param.name = reader.get_string();
    param.dtype = reader.get<DType>();
    const auto dimensions = reader.get<std::uint8_t>();
    if (raw(param.dtype) > raw(DType::complex128) || dimensions > kMaxDimensions || !reader.ok())
      return Status{StatusCode::kInternal, "a damaged layout"};
    param.shape.resize(dimensions);
    for (std::int64_t& size : param.shape) size = reader.get<std::int64_t>();
  }
  if (!reader.finished()) return Status{StatusCode::kInternal, "a damaged layout"};
  try {
    return ExtentLayout{std::move(params), chunk_bytes};
  } catch (const std::invalid_argument& error) {
    return Status{StatusCode::kInternal, formatted("a damaged layout: {}", error.what())};
  }
}

Status match_layouts(const ExtentLayout& theirs, const ExtentLayout& mine, Rank rank) {
  const auto a = theirs.params();
  const auto b = mine.params();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;
    if (a[i].name != b[i].name)
      return {StatusCode::kLayoutMismatch,
              formatted("parameter {} is '{}' on rank {}, but '{}' in the job; build the same "
                        "model and optimizer on every rank",
                        i, b[i].name, raw(rank), a[i].name)};
    return {StatusCode::kLayoutMismatch,
            formatted("parameter '{}' is {} on rank {}, but {} in the job; build the same model "
                      "on every rank",
                      b[i].name, describe(b[i]), raw(rank), describe(a[i]))};
  }
  if (a.size() != b.size())
    return {StatusCode::kLayoutMismatch,
            formatted("rank {} has {} parameters, the job has {}; the first extra one is '{}'",
                      raw(rank), b.size(), a.size(),
                      (b.size() > a.size() ? b[a.size()] : a[b.size()]).name)};
  if (theirs.chunk_bytes() != mine.chunk_bytes())
    return {StatusCode::kLayoutMismatch,
            formatted("rank {} uses chunks of {} bytes, the job uses {}", raw(rank),
                      mine.chunk_bytes(), theirs.chunk_bytes())};
  return {};
}

}  // namespace psplus::store
