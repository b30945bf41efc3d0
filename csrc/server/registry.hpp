#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "server/context.hpp"
#include "server/events.hpp"
#include "server/roster.hpp"

namespace psplus::server {

/// Streams and extents: who has registered what, whose values are the first ones, barriers.
class Registry {
 public:
  Registry(Context& context, Roster& roster) noexcept : context_(context), roster_(roster) {}

  void open(ConnectionId from, const wire::OpenStream& request, std::span<const std::byte> layout,
            std::span<const std::byte> blob);
  void need_pull(ConnectionId from, StreamId stream);
  void close(ConnectionId from, StreamId stream);
  /// Answers closes whose pushes are in (`drained` tells).
  void answer_closes(const std::function<bool(StreamId, MemberId)>& drained);
  /// Sees to it that each stream without values has a worker that is to provide them.
  void settle_providers();
  /// A worker came back after a take-over: it may not have heard that it is to provide values.
  void remind(ConnectionId connection);
  void advance_barriers();

 private:
  struct Applicant {
    ConnectionId from{};
    std::vector<std::byte> blob;
  };
  struct Closing {
    ConnectionId from{};
    StreamId stream{};
    MemberId member{};
  };
  Status create_stream(const wire::OpenStream& request, const store::ExtentLayout& layout);
  Status check_same(const wire::OpenStream& request, const store::ExtentLayout& layout,
                    Rank rank) const;
  /// Makes what is missing of the slots and pull buffers of `member` for all extents of `stream`.
  /// @return the last segment of them.
  Result<SegmentId> make_segments(StreamId stream, MemberId member);
  Result<SegmentId> make_pull(StreamId stream, MemberId member);
  void registered(StreamId stream, MemberId member);
  /// Answers everybody who registered `stream` and can be answered.
  void answer(StreamId stream);
  [[nodiscard]] bool founding_is_complete() const;
  void found();
  [[nodiscard]] bool is_initialised(StreamId stream) const;
  [[nodiscard]] std::optional<MemberId> provider(StreamId stream) const;
  [[nodiscard]] bool choose_provider(StreamId stream);
  void send_ready(ConnectionId to, StreamId stream, MemberId member);

  Context& context_;
  Roster& roster_;
  /// Registered, not yet answered; in order of arrival.
  std::map<StreamId, std::vector<Applicant>> applicants_;
  std::vector<Closing> closings_;
};

}  // namespace psplus::server
