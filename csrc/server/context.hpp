#pragma once

#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "server/events.hpp"
#include "server/push_source.hpp"
#include "store/store.hpp"

namespace psplus::server {

struct Config {
  /// After a take-over, workers that have not come back by then count as dead.
  nanoseconds resume_timeout = std::chrono::seconds{3};
  /// Pushes in one batch at most. Below the number that can wait, members of low numbers come first
  /// however long the others wait; simulations of staleness set 1.
  std::size_t max_batch_pushes = store::kMaxBatchPushes;
  /// Bytes of a chunk that are applied between two stores that a crash can separate.
  std::size_t piece_bytes = 64 * 1024;
};

/// What the parts of the state machine share. All of them run on one thread.
struct Context {
  store::Store& store;
  PushSource& pushes;
  const Config config;
  TimePoint now{};
  std::vector<Effect> effects;

  template <class E>
  void emit(E effect) {
    effects.emplace_back(std::move(effect));
  }
  [[nodiscard]] store::ControlBlock& control() const noexcept { return store.control(); }
  [[nodiscard]] store::MemberEntry& member(MemberId m) const noexcept {
    return control().members[index(m)];
  }
  [[nodiscard]] Incarnation incarnation_of(MemberId m) const noexcept {
    return Incarnation{
        static_cast<std::uint16_t>(member(m).incarnation.load(std::memory_order_relaxed))};
  }
  [[nodiscard]] store::StreamEntry& stream(StreamId s) const noexcept {
    return control().streams[index(s)];
  }
  [[nodiscard]] store::StreamMember& in_stream(StreamId s, MemberId m) const noexcept {
    return stream(s).members[index(m)];
  }
};

/// Relaxed load: the state machine reads words that only it writes, so nothing is to be ordered.
template <class T>
[[nodiscard]] T peek(const std::atomic<T>& word) noexcept {
  return word.load(std::memory_order_relaxed);
}

}  // namespace psplus::server
