#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "collectives/group.hpp"

namespace psplus::collectives {

/// Marks a message for a receiver that waits for the same tag.
enum class Tag : std::int32_t {};

/// Sends and receives between the ranks of a group, beside its collectives and in any order.
///
/// Each ordered pair of ranks has a ring of bytes in the group's memory. A message longer than the
/// ring streams through it. Messages of one sender with the same tag arrive in the order sent; one
/// that comes before its receive is kept aside, if other receives make room for it.
///
/// A send is complete when its bytes have left the buffer, perhaps before they are received.
///
/// Thread safety: all methods from any thread. Completions run on the caller's thread (before
/// `send` or `receive` returns, when nothing has to be waited for) or on the thread of this class,
/// which exists from the first request on that cannot complete at once. They may make new
/// requests, and must not wait.
class Messages {
 public:
  /// Gets ok and the sender's rank, or kTimeout, kPeerLost, kConfig (a message of another size) or
  /// what the group was aborted with. Runs exactly once.
  using Completion = std::function<void(const Status&, Rank)>;

  /// `group` outlives this object.
  explicit Messages(Group& group);
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;
  ~Messages() { shutdown(); }

  /// `data` stays unchanged until `done`. A rank may send to itself.
  void send(Rank to, Tag tag, const void* data, std::size_t bytes, Deadline deadline,
            Completion done);
  /// `from` is nullopt for a message of any rank.
  void receive(std::optional<Rank> from, Tag tag, void* data, std::size_t bytes, Deadline deadline,
               Completion done);

  /// Moves what can be moved now, so that a waiting caller need not wait for the thread.
  void help();

  /// Completes what is open with kClosed and ends the thread. Idempotent.
  void shutdown() noexcept;

 private:
  struct Send {
    std::size_t to;
    Tag tag;
    const std::byte* data;
    std::size_t bytes;
    Deadline deadline;
    Completion done;
    bool started = false;
    std::size_t sent = 0;
  };
  struct Receive {
    std::optional<std::size_t> from;
    Tag tag;
    std::byte* data;
    std::size_t bytes;
    Deadline deadline;
    Completion done;
    bool started = false;
  };
  /// A message on its way in, or kept aside.
  struct Incoming {
    Tag tag{};
    std::size_t bytes = 0;
    std::size_t arrived = 0;
    std::shared_ptr<Receive> target;  ///< null while kept aside
    std::vector<std::byte> kept;
  };
  /// What has completed, to be told outside the lock.
  struct Finished {
    Completion done;
    Status status;
    Rank peer;
  };
  class Ring;

  void progress(std::vector<Finished>& finished);
  void push_out(std::size_t to, std::vector<Finished>& finished);
  void take_in(std::size_t from, std::vector<Finished>& finished);
  void deliver_kept(std::vector<Finished>& finished);
  bool deliver_kept_from(std::size_t from, Receive& receive, std::vector<Finished>& finished);
  void fail_hopeless(std::vector<Finished>& finished);
  [[nodiscard]] std::shared_ptr<Receive> match(std::size_t from, Tag tag);
  [[nodiscard]] bool wanted(std::size_t from) const;
  [[nodiscard]] bool idle() const;
  [[nodiscard]] Deadline next_look() const;
  void remove(const Receive& receive);
  void complete(std::shared_ptr<Receive> receive, Status status, std::size_t from,
                std::vector<Finished>& finished);
  void submitted(std::unique_lock<std::mutex> lock);
  void run();
  static void tell(std::vector<Finished>& finished);
  [[nodiscard]] Ring outgoing(std::size_t to) const;
  [[nodiscard]] Ring incoming(std::size_t from) const;

  Group& group_;
  std::mutex mutex_;  // guards all below; taken alone
  std::vector<std::deque<Send>> sends_;
  std::list<std::shared_ptr<Receive>> receives_;  // in the order posted
  std::vector<std::optional<Incoming>> current_;  // by sender: the message that is streaming in
  std::vector<std::deque<Incoming>> kept_;        // by sender: whole messages without a receive
  bool closed_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace psplus::collectives
