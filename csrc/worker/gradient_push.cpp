// Pushes of gradients, for servers that step, and their state from the worker's end.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/format.hpp"
#include "kernels/kernels.hpp"
#include "server/rule_step.hpp"
#include "worker/dense_stream.hpp"

namespace psplus::worker {

Result<std::int64_t> DenseStream::write_gradients(std::span<const void* const> gradients,
                                                  std::span<const store::StepOptions> options) {
  // A server would expel the worker for what it cannot step by.
  for (const ExtentPart& part : parts_)
    for (std::size_t i = 0; i < part.layout().params().size(); ++i) {
      const std::size_t at = part.first_param() + i;
      if (gradients[at] == nullptr) continue;
      if (const std::string fault = server::fault_of(options[at], part.shard().rule());
          !fault.empty())
        return Status{StatusCode::kConfig,
                      formatted("the hyper-parameters of parameter '{}' {}; servers keep state for "
                                "what its group had when it was wrapped: set momentum or amsgrad "
                                "before psplus.wrap()",
                                params_[at].name, fault)};
    }
  if (Status status = wait_for_slot(); !status.ok()) return status;
  carried_.resize(params_.size());
  for (std::size_t i = 0; i < carried_.size(); ++i) carried_[i] = gradients[i] != nullptr;
  mark_carried();
  const bool streams = value_bytes_ >= kStreamingBytes;
  std::int64_t bad = -1;
  for (const ExtentPart& part : parts_) {
    const auto own = part.own(gradients);
    const auto own_options = part.own(options);
    std::copy(own_options.begin(), own_options.end(), part.slots().options(queue_.next()).begin());
    const std::int64_t found = part.widen_into(own, part.slots().values(queue_.next()), streams);
    if (bad < 0) bad = found;
  }
  return bad;
}

Status DenseStream::publish_plane(std::uint32_t plane, std::span<const void* const> params,
                                  std::span<const std::uint64_t> counts) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  std::uint64_t extents = 0;
  for (const ExtentPart& part : parts_)
    if (write_plane(part, plane, part.own(params), part.own(counts))) extents |= part.bit();
  return extents == 0 ? Status{} : publish_set(store::set_plane(plane), extents, value_bytes_);
}

bool DenseStream::write_plane(const ExtentPart& part, std::uint32_t plane,
                              std::span<const void* const> own_params,
                              std::span<const std::uint64_t> own_counts) {
  if (plane >= part.shard().rule().planes) return false;
  part.widen_into(own_params, part.slots().values(queue_.next()), false);
  const auto options = part.slots().options(queue_.next());
  for (std::size_t i = 0; i < options.size(); ++i) options[i].count = own_counts[i];
  return true;
}

Status DenseStream::read_state(std::span<const std::span<void* const>> planes,
                               std::span<std::uint64_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  std::vector<std::byte> unit;
  for (const ExtentPart& part : parts_) {
    const store::ShardView& shard = part.shard();
    const store::ExtentLayout& layout = part.layout();
    const std::size_t chunk_bytes = layout.chunk_bytes();
    unit.resize(shard.header().unit_bytes);
    for (std::uint32_t c = 0; c < layout.chunk_count(); ++c) {
      const auto batch = shard.read_chunk(ChunkIndex{c}, unit, &counters_.retries);
      if (!batch.ok()) return batch.status();
      for (std::size_t p = 0; p < std::min<std::size_t>(planes.size(), shard.rule().planes); ++p)
        copy_out(part, unit.data() + (1 + p) * chunk_bytes, ChunkIndex{c}, part.own(planes[p]), 0);
      if (shard.rule().planes == 0) continue;
      const auto [first, last] = layout.params_of_chunk(ChunkIndex{c});
      for (std::uint32_t k = first; k < last; ++k) {
        std::uint64_t count = 0;
        std::memcpy(&count, unit.data() + shard.counts_offset() + (k - first) * sizeof(count),
                    sizeof(count));
        // A batch may be under way: the chunks that it has reached are a step ahead.
        std::uint64_t& most = counts[part.first_param() + layout.order()[k]];
        most = std::max(most, count);
      }
    }
  }
  return {};
}

}  // namespace psplus::worker
