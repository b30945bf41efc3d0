#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "base/status.hpp"
#include "base/unix_socket.hpp"
#include "store/control.hpp"
#include "store/mailbox.hpp"
#include "wire/messages.hpp"
#include "worker/held_segments.hpp"

namespace psplus::worker {

struct SessionOptions {
  std::string job_dir;      ///< exists, is ours alone
  std::string server_path;  ///< the psplus-server executable
  Rank rank{};
  std::uint32_t world_size = 1;
  nanoseconds timeout = std::chrono::seconds{60};  ///< longest silence of whoever is waited for
  nanoseconds straggler_timeout = std::chrono::seconds{1800};
  /// Asked about ten times a second by waiting calls; true ends the wait with kClosed.
  std::function<bool()> interrupted = [] { return false; };
  /// Told, once a wait, when those waited for are alive but slower than `timeout`.
  std::function<void(const std::string&)> warn = [](const std::string&) {};
};

/// A worker's attachment to its host's server. A thread of its own answers for this process while
/// the others compute: it takes descriptors, counts the heartbeat, and starts a successor when the
/// server dies.
///
/// Thread safety: all methods from any thread.
class Session {
 public:
  /// Attaches, starting a server if there is none. kTimeout, kConfig, kPeerLost as the messages
  /// say.
  static Result<std::shared_ptr<Session>> connect(SessionOptions options);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  /// Closes without flushing if close() was not called. In a forked child it only lets go.
  ~Session();

  /// Sends `request` (with descriptors `fds`) and waits for its answer; asks again when the server
  /// was replaced meanwhile. `still_hopeful` is called while waiting: a bad status ends the wait.
  Result<wire::ToWorker> ask(const wire::ToServer& request, const std::vector<int>& fds,
                             const std::function<Status()>& still_hopeful);
  /// Waits for published pushes to be applied, detaches and joins the thread. Idempotent.
  Status close(nanoseconds timeout);

  /// Wakes the server if it sleeps; called after a store that it should look at.
  void ring() noexcept;

  /// Ok, or why the session cannot go on.
  [[nodiscard]] Status failure() const;
  /// For a waiting call: failure, interruption, or silence of the server for `timeout`, counted
  /// from `waiting_since` at the earliest.
  [[nodiscard]] Status check_server(TimePoint waiting_since, nanoseconds timeout) const;

  [[nodiscard]] const SessionOptions& options() const noexcept { return options_; }
  [[nodiscard]] MemberId member() const noexcept { return member_; }
  [[nodiscard]] Incarnation incarnation() const noexcept { return incarnation_; }
  [[nodiscard]] Epoch epoch() const noexcept { return epoch_.load(std::memory_order_relaxed); }
  [[nodiscard]] const store::ControlBlock& control() const noexcept { return *control_; }
  [[nodiscard]] store::MailboxBlock& mailbox() const noexcept { return *mailbox_; }
  [[nodiscard]] std::shared_ptr<Segment> segment(store::SegmentKind kind, ExtentId extent) const;
  [[nodiscard]] std::shared_ptr<Segment> segment(SegmentId id) const;
  [[nodiscard]] std::uint32_t server_restarts() const noexcept {
    return restarts_.load(std::memory_order_relaxed);
  }
  /// Whether the server has made this worker the one whose values an extent begins with.
  [[nodiscard]] bool provides(StreamId stream, StreamExtent extent) const;

 private:
  explicit Session(SessionOptions options);
  void run(std::stop_token stop) noexcept;
  Status establish(std::stop_token stop);
  /// What is told of a server that could not be reached or replaced until the time-out.
  Status gave_up(const Status& last);
  Status introduce();
  Status serve(std::stop_token stop);
  Status receive();
  Status take(UnixMessage message);
  Status welcome(const wire::Welcome& message, std::vector<UniqueFd> fds);
  void fail(Status status);
  void wake_waiters() noexcept;
  [[nodiscard]] Status send(const wire::ToServer& message, const std::vector<int>& fds);

  const SessionOptions options_;
  const pid_t process_;

  // Set before attached_ becomes true, constant from then on.
  MemberId member_{};
  Incarnation incarnation_{};
  std::uint64_t job_ = 0;
  std::shared_ptr<Segment> control_segment_;
  std::shared_ptr<Segment> mailbox_segment_;
  const store::ControlBlock* control_ = nullptr;
  store::MailboxBlock* mailbox_ = nullptr;

  std::atomic<Epoch> epoch_{};
  std::atomic<std::uint32_t> restarts_{0};

  mutable std::mutex mutex_;  ///< guards everything below but thread_
  std::condition_variable changed_;
  std::size_t asking_ = 0;  ///< requests without an answer: one, for which the next ones wait
  UnixSocket socket_;
  UniqueFd server_process_;
  UniqueFd doorbell_;
  HeldSegments held_;
  Status failure_;
  bool attached_ = false;   ///< attached at least once
  bool connected_ = false;  ///< attached to the server that is there now
  bool detached_ = false;
  std::uint32_t life_ = 0;       ///< counts attachments
  std::uint32_t served_by_ = 0;  ///< process of the server attached to last
  std::optional<wire::ToWorker> answer_;
  using ExtentBits = std::array<std::uint64_t, store::kMaxStreams>;
  ExtentBits provided_{};  ///< bit e of stream s: our values are the first of its extent e
  ExtentBits ready_{};     ///< likewise: its registration has been answered

  UniqueFd nudge_;                        ///< wakes the thread to stop
  std::unique_ptr<std::jthread> thread_;  ///< last: joins before the state it uses goes
};

}  // namespace psplus::worker
