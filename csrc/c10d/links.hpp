#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "c10d/torch_compat.hpp"

namespace psplus::pg {

/// What ranks of different hosts say to each other: messages through a Gloo group that has all
/// ranks and no other use. Its collectives would do as well, but cannot be ended from outside, and
/// their threads would use the caller's memory after that.
///
/// Between two ranks messages arrive in the order sent; both ends know how long each is, and empty
/// ones do not travel.
///
/// Thread safety: one exchange at a time; `close` from any thread meanwhile.
class Links {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  struct Outgoing {
    Rank to;
    const void* data;
    std::size_t bytes;
  };
  struct Incoming {
    Rank from;
    void* data;
    std::size_t bytes;
  };

  /// `names` are what messages call the ranks.
  Links(BackendPtr gloo, std::vector<std::string> names)
      : names_(std::move(names)), gloo_(std::move(gloo)) {}

  /// Sends and receives all of this at once, and runs `meanwhile` while it is under way. The memory
  /// is the caller's again when this returns. Errors: kPeerLost or kTimeout naming a rank, kClosed,
  /// what `meanwhile` returned (it must not throw); links are of no use then.
  Status exchange(std::span<const Outgoing> sends, std::span<const Incoming> receives,
                  Deadline deadline, const std::function<Status()>& meanwhile = {});

  /// The rank that the last exchange failed because of, if it was one.
  [[nodiscard]] std::optional<Rank> culprit() const { return culprit_; }

  /// Ends an exchange under way and closes the connections, which the other ends notice.
  /// Idempotent.
  void close() noexcept;

  /// In a forked child: lets go without touching what belongs to the parent's threads.
  void forget() noexcept { (void)gloo_.release(); }

 private:
  struct Started {
    c10::intrusive_ptr<c10d::Work> work;
    Rank peer;
  };

  Status start(c10d::Backend& gloo, std::span<const Outgoing> sends,
               std::span<const Incoming> receives);
  void add(Started started);
  Status await(const Started& started, Deadline deadline);
  Status lost(Rank peer, const std::exception& error);

  const std::vector<std::string> names_;
  std::optional<Rank> culprit_;
  std::mutex mutex_;  // guards all below; taken alone
  BackendPtr gloo_;   // null once closed
  std::vector<Started> under_way_;
};

}  // namespace psplus::pg
