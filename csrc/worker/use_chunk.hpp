#pragma once

#include "worker/dense_stream.hpp"

namespace psplus::worker {

#if defined(__SANITIZE_THREAD__)
/// The sanitizer cannot know that what a racing read found is thrown away: it gets a copy made by
/// atomics.
inline constexpr bool kReadsInPlace = false;
#else
inline constexpr bool kReadsInPlace = true;
#endif

template <class Use>
Status DenseStream::use_chunk(const ExtentPart& part, ChunkIndex chunk, Use use) {
  const std::size_t chunk_bytes = part.layout().chunk_bytes();
  if (options_.pull == store::PullMode::kBuffered) {
    use(part.pulls().values(*cut_).data() + index(chunk) * chunk_bytes, false);
    return {};
  }
  if constexpr (kReadsInPlace)
    return part.shard().read_in_place(chunk, counters_.retries, use).status();
  copy_.resize(chunk_bytes);
  const auto batch = part.shard().read_chunk(chunk, copy_, &counters_.retries);
  if (batch.ok()) use(copy_.data(), false);
  return batch.status();
}

}  // namespace psplus::worker
