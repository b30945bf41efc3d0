#include "worker/step_vector.hpp"

#include "store/limits.hpp"

namespace psplus::worker {

std::uint64_t StepVector::foreign(MemberId self) const noexcept {
  std::uint64_t sum = 0;
  for (std::size_t m = 0; m < pushes.size(); ++m)
    if (m != index(self)) sum += pushes[m];
  return sum;
}

StepVector load_step_vector(const store::ControlBlock& control, StreamId stream) {
  StepVector vector{std::vector<std::uint64_t>(store::kMaxMembers),
                    std::vector<std::uint64_t>(store::kMaxMembers)};
  const store::StreamEntry& entry = control.streams[index(stream)];
  for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
    vector.clock[m] = entry.members[m].clock.load(std::memory_order_relaxed);
    vector.pushes[m] = entry.members[m].pushes.load(std::memory_order_relaxed);
  }
  // The chunks that follow are not read before the counters.
  std::atomic_thread_fence(std::memory_order_acquire);
  return vector;
}

StepVector load_step_vector(const store::PullHeader::Cut& cut) {
  StepVector vector{std::vector<std::uint64_t>(store::kMaxMembers),
                    std::vector<std::uint64_t>(store::kMaxMembers)};
  for (std::size_t m = 0; m < store::kMaxMembers; ++m) {
    vector.clock[m] = cut.clock[m].load(std::memory_order_relaxed);
    vector.pushes[m] = cut.pushes[m].load(std::memory_order_relaxed);
  }
  return vector;
}

}  // namespace psplus::worker
