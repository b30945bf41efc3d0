#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"

namespace psplus::store {

/// One parameter as its owner declares it.
struct ParamSpec {
  std::string name;
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;

  [[nodiscard]] std::uint64_t element_count() const noexcept;
  friend bool operator==(const ParamSpec&, const ParamSpec&) = default;
};

/// Where a parameter lies in its extent. Shards, slots and buffers of an extent share one byte
/// addressing: chunk c holds bytes [c * chunk_bytes, (c + 1) * chunk_bytes).
struct ParamPlace {
  std::uint64_t byte_offset;   ///< multiple of 64
  std::uint64_t scalar_count;  ///< storage scalars: a complex element is two
  Storage storage;

  [[nodiscard]] std::uint64_t byte_end() const noexcept {
    return byte_offset + scalar_count * storage_bytes(storage);
  }
};

/// The parameters of one extent and their places: first the section of float32 storage, then that
/// of float64, each starting at a chunk. Immutable once made; equal on every worker.
class ExtentLayout {
 public:
  /// Throws std::invalid_argument for duplicate names, negative or overflowing shapes, a chunk size
  /// that is not a multiple of 64 and for more than 2^24 chunks.
  ExtentLayout(std::vector<ParamSpec> params, std::size_t chunk_bytes);

  [[nodiscard]] std::span<const ParamSpec> params() const noexcept { return params_; }
  [[nodiscard]] std::span<const ParamPlace> places() const noexcept { return places_; }
  [[nodiscard]] std::size_t chunk_bytes() const noexcept { return chunk_bytes_; }
  [[nodiscard]] std::uint32_t chunk_count() const noexcept { return chunk_count_; }
  [[nodiscard]] std::uint64_t value_bytes() const noexcept {
    return static_cast<std::uint64_t>(chunk_count_) * chunk_bytes_;
  }
  [[nodiscard]] Storage storage_of_chunk(ChunkIndex chunk) const noexcept {
    return raw(chunk) < float32_chunks_ ? Storage::float32 : Storage::float64;
  }
  /// Parameters that lie in `chunk`, as a half-open range of indices into places_in_order().
  struct Range {
    std::uint32_t first;
    std::uint32_t last;
  };
  [[nodiscard]] Range params_of_chunk(ChunkIndex chunk) const noexcept;
  /// The largest number of parameters that share a chunk.
  [[nodiscard]] std::uint32_t most_params_in_a_chunk() const noexcept;
  /// Indices of non-empty parameters by ascending byte offset.
  [[nodiscard]] std::span<const std::uint32_t> order() const noexcept { return order_; }

  /// Bytes of a bitmap with one bit a parameter, rounded up to whole words.
  [[nodiscard]] std::size_t bitmap_bytes() const noexcept { return (params_.size() + 63) / 64 * 8; }

  /// Self-describing bytes, for the shard segment and the socket.
  [[nodiscard]] std::vector<std::byte> serialize() const;
  /// Errors: kInternal for damaged bytes; never reads outside `bytes`.
  static Result<ExtentLayout> parse(std::span<const std::byte> bytes);

 private:
  std::vector<ParamSpec> params_;
  std::vector<ParamPlace> places_;
  std::vector<std::uint32_t> order_;
  std::size_t chunk_bytes_;
  std::uint32_t chunk_count_ = 0;
  std::uint32_t float32_chunks_ = 0;
};

/// kLayoutMismatch naming the first parameter that differs, with both shapes and dtypes; `theirs`
/// is what the job holds, `mine` what the worker of `rank` declares.
Status match_layouts(const ExtentLayout& theirs, const ExtentLayout& mine, Rank rank);

}  // namespace psplus::store
