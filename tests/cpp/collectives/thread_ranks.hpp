#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "collectives/group.hpp"
#include "support/status_matchers.hpp"

namespace psplus::collectives::testing {

inline constexpr Nonce kNonce{1, 2};

/// Long enough for a loaded machine under a sanitizer: what it bounds is a hang.
inline Deadline patience() { return Deadline::after(std::chrono::seconds{60}); }

/// Zeroed, cache-line aligned memory for a group whose ranks are threads, so that a thread
/// sanitizer sees both sides of every access.
class HeapGroupMemory {
 public:
  explicit HeapGroupMemory(std::size_t size)
      : lines_(GroupMemory::bytes_for(size) / sizeof(Line) + 1),
        memory_(GroupMemory::format(std::as_writable_bytes(std::span{lines_}), size, kNonce)) {}
  [[nodiscard]] const GroupMemory& memory() const { return memory_; }

 private:
  struct alignas(64) Line {
    std::uint64_t words[8];
  };
  std::vector<Line> lines_;
  GroupMemory memory_;
};

/// Runs `body(group)` as each rank of a group of `size`, a thread a rank.
inline void run_ranks(std::size_t size, const std::function<void(Group&)>& body) {
  HeapGroupMemory heap{size};
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      const auto group = Group::attach(heap.memory(), static_cast<Rank>(r));
      ASSERT_OK(group->connect(patience()));
      body(*group);
      group->leave();
    });
}

}  // namespace psplus::collectives::testing
