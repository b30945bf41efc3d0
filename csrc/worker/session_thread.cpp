// The thread of a session: attaching, taking descriptors, heartbeat, replacing a dead server.

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/format.hpp"
#include "base/host_name.hpp"
#include "runtime/shm/job_files.hpp"
#include "worker/server_process.hpp"
#include "worker/session.hpp"

namespace psplus::worker {
namespace {

constexpr nanoseconds kHeartbeat = milliseconds{500};
constexpr nanoseconds kFirstRetry = milliseconds{2};
constexpr nanoseconds kLongestRetry = milliseconds{50};
constexpr nanoseconds kStartPatience = std::chrono::seconds{15};

}  // namespace

void Session::run(std::stop_token stop) noexcept {
  ::pthread_setname_np(::pthread_self(), "psplus-session");
  try {
    while (!stop.stop_requested()) {
      if (Status status = establish(stop); !status.ok()) return fail(std::move(status));
      Status status = serve(stop);
      if (stop.stop_requested()) return;
      if (status.code() != StatusCode::kPeerLost) return fail(std::move(status));
      // The server is gone, or dropped us: come back, or replace it.
      const std::scoped_lock lock(mutex_);
      if (detached_) return;
      connected_ = false;
    }
  } catch (const std::exception& error) {
    fail({StatusCode::kInternal, formatted("the session's thread: {}", error.what())});
  }
}

/// Connects to the job's server; starts one when nobody listens, handing it what we hold.
Status Session::establish(std::stop_token stop) {
  const Deadline deadline = Deadline::after(options_.timeout);
  Status last{StatusCode::kPeerLost, "no server could be reached"};
  bool is_first_attempt = true;
  nanoseconds retry = kFirstRetry;
  while (!stop.stop_requested()) {
    auto socket = UnixSocket::connect(shm::socket_path(options_.job_dir));
    if (socket.ok()) {
      const std::scoped_lock lock(mutex_);
      socket_ = std::move(socket).value();
      server_process_.reset();  // its Welcome brings the new one
      if (!attached_) held_.clear();
      Status introduced = introduce();
      if (introduced.code() != StatusCode::kPeerLost) return introduced;
      last = std::move(introduced);  // it ended just now
    } else if (socket.status().code() != StatusCode::kBusy) {
      return gave_up(socket.status());
    }
    bool attached = false;
    std::vector<int> segments;
    int predecessor = -1;
    {
      const std::scoped_lock lock(mutex_);
      attached = attached_;
      if (attached) {
        segments = held_.descriptors();
        predecessor = server_process_.get();
      }
    }
    const auto reply = start_server(options_.server_path, options_.job_dir, segments, predecessor,
                                    deadline.at_most(kStartPatience));
    if (!reply.ok()) {
      // What came of an earlier attempt tells more than that the last one's time was too short.
      if (reply.status().code() != StatusCode::kTimeout || is_first_attempt) last = reply.status();
      // A limit that is in the way is told at once, unless a job is under way: that one waits for
      // the limit to give way.
      if (last.code() == StatusCode::kConfig || (!attached && last.code() == StatusCode::kNoSpace))
        return gave_up(last);
    } else {
      switch (reply->result) {
        case wire::BootResult::kReady:
          continue;
        case wire::BootResult::kLostRace:
          last = {StatusCode::kPeerLost, reply->text};
          break;
        case wire::BootResult::kFailed:
          // Nobody is lost who was never there.
          last = {attached ? StatusCode::kPeerLost : StatusCode::kInternal,
                  formatted("the server of this job could not be started: {}", reply->text)};
          if (!attached) return gave_up(last);
          break;
      }
    }
    if (deadline.passed())
      return gave_up({last.code(), formatted("{}; tried for {} s", last.message(),
                                             to_seconds(options_.timeout))});
    std::this_thread::sleep_for(retry);  // the winner of the race may be about to listen
    retry = std::min(retry * 2, kLongestRetry);
    is_first_attempt = false;
  }
  return last;
}

Status Session::gave_up(const Status& last) {
  std::string lost;
  StatusCode code = last.code();
  const std::scoped_lock lock(mutex_);
  if (attached_) {
    if (code != StatusCode::kConfig) code = StatusCode::kPeerLost;
    lost = formatted(
        "the server of this job (process {}) was killed or crashed, and none replaces it: ",
        control_->server_process.load(std::memory_order_relaxed));
  }
  return {code, formatted("{}{} (rank {} on host {}){}", lost, last.message(), raw(options_.rank),
                          host_name(), shm::last_words(options_.job_dir))};
}

Status Session::introduce() {
  auto own_process = open_pidfd(process_);
  if (!own_process.ok()) return own_process.status();
  const std::vector<int> fds{own_process->get()};
  if (attached_)
    return send(wire::Resume{.protocol = wire::kProtocolVersion,
                             .job = job_,
                             .member = member_,
                             .incarnation = incarnation_},
                fds);
  return send(wire::Attach{.protocol = wire::kProtocolVersion,
                           .rank = options_.rank,
                           .world_size = options_.world_size,
                           .process = static_cast<std::uint32_t>(process_)},
              fds);
}

Status Session::serve(std::stop_token stop) {
  TimePoint next_beat = Clock::now();
  for (;;) {
    if (stop.stop_requested()) return {};
    if (Clock::now() >= next_beat) {
      next_beat = Clock::now() + kHeartbeat;
      if (mailbox_ != nullptr) mailbox_->heartbeat.fetch_add(1, std::memory_order_relaxed);
    }
    pollfd entries[3] = {{.fd = socket_.fd().get(), .events = POLLIN, .revents = 0},
                         {.fd = nudge_.get(), .events = POLLIN, .revents = 0},
                         {.fd = server_process_.get(), .events = POLLIN, .revents = 0}};
    const auto left = std::chrono::ceil<milliseconds>(next_beat - Clock::now()).count();
    const int ready = ::poll(entries, 3, static_cast<int>(std::max<std::int64_t>(left, 0)));
    if (ready < 0 && errno != EINTR) return Status::from_errno("poll", "a session", errno);
    if (ready <= 0) continue;
    if (entries[0].revents != 0) {
      if (Status status = receive(); !status.ok()) return status;
    } else if (entries[2].revents != 0) {
      return {StatusCode::kPeerLost, "the server of this job ended"};
    }
  }
}

Status Session::receive() {
  for (;;) {
    auto message = socket_.receive(Deadline{Clock::now()});
    if (message.status().code() == StatusCode::kBusy) return {};
    if (!message.ok()) return message.status();
    if (Status status = take(std::move(message).value()); !status.ok()) return status;
  }
}

Status Session::take(UnixMessage message) {
  auto decoded = wire::decode_to_worker(message.bytes);
  if (!decoded.ok()) return decoded.status();
  const std::scoped_lock lock(mutex_);
  if (const auto* const m = std::get_if<wire::Welcome>(&*decoded))
    return welcome(*m, std::move(message.fds));
  if (const auto* const m = std::get_if<wire::Offer>(&*decoded)) {
    if (message.fds.size() != 1)
      return {StatusCode::kInternal, "the server offered a segment without its descriptor"};
    if (Status status = held_.add(m->segment, std::move(message.fds.front())); !status.ok())
      return status;
    return send(wire::Holding{m->segment}, {});
  }
  if (const auto* const m = std::get_if<wire::Drop>(&*decoded)) {
    held_.drop(m->segment);
    return {};
  }
  if (std::holds_alternative<wire::Attached>(*decoded)) {
    held_.end_census();
    mailbox_segment_ = held_.find(store::SegmentKind::kMailbox, ExtentId{});
    if (mailbox_segment_ == nullptr)
      return {StatusCode::kInternal, "the server attached this worker without a mailbox"};
    mailbox_ = reinterpret_cast<store::MailboxBlock*>(mailbox_segment_->bytes().data());
    // Counted here, not when a connection is lost: a dying server may lose us more than once.
    const std::uint32_t process = control_->server_process.load(std::memory_order_relaxed);
    if (attached_ && process != served_by_) restarts_.fetch_add(1, std::memory_order_relaxed);
    served_by_ = process;
    attached_ = connected_ = true;
    ++life_;
    changed_.notify_all();
    return {};
  }
  if (const auto* const m = std::get_if<wire::Refused>(&*decoded); m != nullptr && m->fatal)
    return {m->code == StatusCode::kPeerLost ? StatusCode::kInternal : m->code, m->text};
  if (const auto* const m = std::get_if<wire::StreamReady>(&*decoded)) {
    const std::uint64_t bit = std::uint64_t{1} << raw(m->extent);
    if (m->provides) provided_[index(m->stream)] |= bit;
    std::uint64_t& ready = ready_[index(m->stream)];
    if ((std::exchange(ready, ready | bit) & bit) != 0) {
      // No answer: whoever was to provide the values has died, and it is our turn.
      wake_waiters();
      return {};
    }
  }
  detached_ = detached_ || std::holds_alternative<wire::Detached>(*decoded);
  answer_ = std::move(*decoded);
  changed_.notify_all();
  return {};
}

Status Session::welcome(const wire::Welcome& message, std::vector<UniqueFd> fds) {
  if (fds.size() != 3) return {StatusCode::kInternal, "the server's welcome lacks its descriptors"};
  if (!attached_) {
    member_ = message.member;
    incarnation_ = message.incarnation;
    job_ = message.job;
    held_.set_self(member_, incarnation_);
    auto header = SegmentId{1};
    if (Status status = held_.add(header, std::move(fds[0])); !status.ok()) return status;
    control_segment_ = held_.find(header);
    if (control_segment_->size() != sizeof(store::ControlBlock))
      return {StatusCode::kInternal,
              "the control segment has another size; install the same psplus version everywhere"};
    control_ = reinterpret_cast<const store::ControlBlock*>(control_segment_->bytes().data());
  }
  held_.begin_census();
  server_process_ = std::move(fds[1]);
  doorbell_ = std::move(fds[2]);
  epoch_.store(message.epoch, std::memory_order_relaxed);
  return {};
}

}  // namespace psplus::worker
