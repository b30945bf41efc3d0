#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "server/context.hpp"
#include "server/events.hpp"
#include "server/roster.hpp"

namespace psplus::server {

/// Streams and extents: who has registered what, whose values are the first ones, barriers.
///
/// A stream begins with one extent; others are appended, and each worker registers them in that
/// order, when it comes to them. Invariant: a member's bit for an extent is set when every live
/// worker holds its segments for it. Only then may it push the extent or provide its first values.
class Registry {
 public:
  Registry(Context& context, Roster& roster) noexcept : context_(context), roster_(roster) {}

  void open(ConnectionId from, const wire::OpenStream& request, std::span<const std::byte> layout,
            std::span<const std::byte> blob);
  void need_pull(ConnectionId from, StreamId stream);
  void close(ConnectionId from, StreamId stream);
  /// Answers closes whose pushes are in (`drained` tells).
  void answer_closes(const std::function<bool(StreamId, MemberId)>& drained);
  /// Sees to it that each extent without values has a worker that is to provide them.
  void settle_providers();
  /// A job that has not begun cannot without a rank that was refused and has ended since: tells
  /// those who wait for it.
  void give_up_on_refused();
  /// A worker came back after a take-over: it may not have heard that it is to provide values.
  void remind(ConnectionId connection);
  /// Notes who stands at a barrier, and opens those where everybody does.
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
  void open_barrier(StreamId stream);
  [[nodiscard]] store::ExtentEntry& entry_of(ExtentId extent) const noexcept {
    return context_.control().extents[index(extent)];
  }
  [[nodiscard]] StreamId stream_id_of(ExtentId extent) const noexcept {
    return StreamId{static_cast<std::uint16_t>(peek(entry_of(extent).stream))};
  }
  /// The extent at a place of a stream, if it has been created.
  [[nodiscard]] std::optional<ExtentId> extent_of(StreamId stream, StreamExtent place) const;
  [[nodiscard]] Status check_order(const wire::OpenStream& request, MemberId member) const;
  /// Creates an extent, and its stream if it is the first one.
  Status create_extent(const wire::OpenStream& request, const store::ExtentLayout& layout);
  Status check_same(const wire::OpenStream& request, const store::ExtentLayout& layout,
                    Rank rank) const;
  /// Makes what is missing of the slots and pull buffers of `member` for an extent.
  /// @return the last segment of them.
  Result<SegmentId> make_segments(ExtentId extent, MemberId member);
  Result<SegmentId> make_pull(ExtentId extent, MemberId member);
  void registered(ExtentId extent, MemberId member);
  [[nodiscard]] bool has_registered(ExtentId extent, MemberId member) const;
  /// Answers everybody who registered `extent` and can be answered.
  void answer(ExtentId extent);
  [[nodiscard]] bool founding_is_complete() const;
  void found();
  [[nodiscard]] bool is_initialised(ExtentId extent) const;
  [[nodiscard]] std::optional<MemberId> provider(ExtentId extent) const;
  [[nodiscard]] bool choose_provider(ExtentId extent);
  void send_ready(ConnectionId to, ExtentId extent, MemberId member);

  Context& context_;
  Roster& roster_;
  /// Registered, not yet answered; in order of arrival.
  std::map<ExtentId, std::vector<Applicant>> applicants_;
  std::vector<Closing> closings_;
  /// Whose last registration was refused before the job began, and why. A successor does not know
  /// them: there the wait's time-out tells who is missing.
  std::map<Rank, Status> refused_;
};

}  // namespace psplus::server
