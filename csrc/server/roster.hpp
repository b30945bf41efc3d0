#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "server/context.hpp"
#include "server/events.hpp"

namespace psplus::server {

/// Who is attached, and who holds which segment.
///
/// Invariant: before a worker counts (and before anybody's answer relies on a segment), every live
/// worker holds that segment's descriptor, so that any of them can hand all of them to a successor.
class Roster {
 public:
  explicit Roster(Context& context) noexcept : context_(context) {}

  /// After a take-over: live members must resume until `context.config.resume_timeout` has passed.
  void recover();

  void attach(ConnectionId from, const wire::Attach& request);
  void resume(ConnectionId from, const wire::Resume& request);
  void holding(ConnectionId from, SegmentId segment);
  /// A worker closes its session: answered when its pushes are in.
  void detach(ConnectionId from);
  void lost(ConnectionId connection);
  /// Closes a worker out for breaking the protocol.
  void expel(MemberId member, const std::string& reason);
  void tick();
  /// Frees the places of members whose last pushes have been applied (`drained` tells).
  void release_drained(const std::function<bool(MemberId)>& drained);

  /// Offers new segments to every attached worker; `then` runs once all of them hold it.
  void offer(SegmentId segment);
  void when_all_hold(SegmentId segment, std::function<void()> then);

  [[nodiscard]] std::optional<MemberId> member_of(ConnectionId connection) const;
  [[nodiscard]] std::optional<ConnectionId> connection_of(MemberId member) const;
  [[nodiscard]] bool anybody() const;
  /// Whether a worker of this rank is attached, or waits for its former life to end.
  [[nodiscard]] bool is_attached(Rank rank) const;
  void refuse(ConnectionId to, StatusCode code, std::string text, bool fatal = false);
  /// Whether any member's last pushes are still to be applied.
  [[nodiscard]] bool anybody_draining() const;

 private:
  struct Peer {
    MemberId member{};
    SegmentId holding{};  ///< it has confirmed every offer up to this one
    bool detaching = false;
  };
  struct Waiter {
    SegmentId segment;
    std::function<void()> then;
  };
  struct Queued {
    ConnectionId from;
    wire::Attach request;
  };
  [[nodiscard]] std::optional<MemberId> place_for(Rank rank) const;
  void admit(ConnectionId from, const wire::Attach& request);
  void begin_draining(MemberId member);
  void refuse_taken(ConnectionId to, MemberId holder);
  void run_waiters();
  /// A worker whose heartbeat has moved is alive, however long it computes, sleeps or waits.
  void look_for_life();

  Context& context_;
  std::map<ConnectionId, Peer> peers_;
  std::vector<Waiter> waiters_;
  std::vector<Queued> queue_;  ///< ranks whose former life is still draining
  std::map<MemberId, TimePoint> unresumed_;
  std::uint64_t heartbeats_[store::kMaxMembers] = {};  ///< at the last look
};

}  // namespace psplus::server
