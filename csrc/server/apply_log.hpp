#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <variant>

#include "base/ids.hpp"

namespace psplus::server {

/// Apply the batch that the record holds open.
struct ApplyBatch {};
/// Copy one state of a stream's extents into a worker's pull buffer.
struct TakeCut {
  StreamId stream{};
  MemberId member{};
  Incarnation incarnation{};
  std::uint32_t buffer = 0;
  /// Either the step whose reply this is (buffered pull), or a request of the worker.
  std::optional<Step> releases;
  std::uint64_t request = 0;

  friend bool operator==(const TakeCut&, const TakeCut&) = default;
};
using Operation = std::variant<ApplyBatch, TakeCut>;

/// The one order in which a server changes or copies its shards. An operation runs to its end
/// before the next begins; a batch is formed only when everything before it has run, so a cut lies
/// between two batches by construction.
class ApplyLog {
 public:
  void append(Operation operation) { pending_.push_back(operation); }
  [[nodiscard]] bool empty() const noexcept { return pending_.empty(); }
  [[nodiscard]] const Operation& front() const { return pending_.front(); }
  void pop() { pending_.pop_front(); }
  [[nodiscard]] const std::deque<Operation>& pending() const noexcept { return pending_; }

 private:
  std::deque<Operation> pending_;
};

}  // namespace psplus::server
