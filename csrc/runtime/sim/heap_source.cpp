#include "runtime/sim/heap_source.hpp"

#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/format.hpp"
#include "store/limits.hpp"

namespace psplus::sim {

Result<store::SegmentHandle> HeapSource::create(std::string_view label, std::size_t size) {
  ++created_;
  if (refused_ == created_)
    return Status{StatusCode::kNoSpace,
                  formatted("the simulated machine has no {} bytes left for {}", size, label)};
  const std::size_t reserved = store::round_up(size, store::kPageBytes);
  const std::shared_ptr<void> memory{std::aligned_alloc(store::kPageBytes, reserved), std::free};
  if (memory == nullptr)
    return Status{StatusCode::kNoSpace, formatted("no {} bytes left for {}", size, label)};
  std::memset(memory.get(), 0, reserved);
  return store::SegmentHandle{
      .bytes = {static_cast<std::byte*>(memory.get()), size}, .owner = memory, .fd = -1};
}

}  // namespace psplus::sim
