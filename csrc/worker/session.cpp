#include "worker/session.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <system_error>
#include <utility>

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/counted.hpp"
#include "base/format.hpp"
#include "base/futex.hpp"
#include "base/host_name.hpp"
#include "base/process_limits.hpp"
#include "runtime/shm/job_files.hpp"

namespace psplus::worker {
namespace {

constexpr nanoseconds kLook = milliseconds{100};
/// A wait lasts this much longer than the thread tries to reach a server, so that the thread's
/// reason is the one that is told.
constexpr nanoseconds kGrace = milliseconds{500};

/// Whether a message is the answer to a request, not a late one to a request that has timed out.
bool answers(const wire::ToServer& request, const wire::ToWorker& message) {
  if (std::holds_alternative<wire::Refused>(message)) return true;
  if (const auto* const open = std::get_if<wire::OpenStream>(&request)) {
    const auto* const ready = std::get_if<wire::StreamReady>(&message);
    return ready != nullptr && ready->stream == open->stream && ready->extent == open->extent;
  }
  if (const auto* const need = std::get_if<wire::NeedPull>(&request)) {
    const auto* const ready = std::get_if<wire::PullReady>(&message);
    return ready != nullptr && ready->stream == need->stream;
  }
  if (const auto* const close = std::get_if<wire::CloseStream>(&request)) {
    const auto* const closed = std::get_if<wire::StreamClosed>(&message);
    return closed != nullptr && closed->stream == close->stream;
  }
  return std::holds_alternative<wire::Detached>(message);
}

}  // namespace

Session::Session(SessionOptions options) : options_(std::move(options)), process_(::getpid()) {}

Result<std::shared_ptr<Session>> Session::connect(SessionOptions options) {
  std::shared_ptr<Session> session{new Session(std::move(options))};
  raise_to_hard_limit(RLIMIT_NOFILE);  // this process holds a descriptor of every segment
  session->nudge_ = UniqueFd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!session->nudge_) return Status::from_errno("eventfd", "a session", errno);
  try {
    session->thread_ = std::make_unique<std::jthread>(
        [raw_session = session.get()](std::stop_token stop) noexcept { raw_session->run(stop); });
  } catch (const std::system_error& error) {
    return cannot_start("psplus's thread", error.code().value());
  }
  const Deadline deadline = Deadline::after(session->options_.timeout + kGrace);
  std::unique_lock lock(session->mutex_);
  while (!session->attached_ && session->failure_.ok()) {
    if (session->options_.interrupted()) return Status{StatusCode::kClosed, "interrupted"};
    if (deadline.passed())
      return Status{
          StatusCode::kTimeout,
          formatted("rank {} on host {} could not attach to the server of this job within "
                    "{} s; see {}",
                    raw(session->options_.rank), host_name(), to_seconds(session->options_.timeout),
                    shm::log_path(session->options_.job_dir))};
    session->changed_.wait_for(lock, kLook);
  }
  if (!session->failure_.ok()) return session->failure_;
  lock.unlock();
  return session;
}

Session::~Session() {
  if (::getpid() != process_) {
    // A forked child has no such thread: nothing to join, and joining would hang.
    static_cast<void>(thread_.release());
    return;
  }
  if (thread_ == nullptr) return;
  thread_->request_stop();
  ::eventfd_write(nudge_.get(), 1);
}

Status Session::send(const wire::ToServer& message, const std::vector<int>& fds) {
  return socket_.send(wire::encode(message), fds, Deadline::after(std::chrono::seconds{1}));
}

Result<wire::ToWorker> Session::ask(const wire::ToServer& request, const std::vector<int>& fds,
                                    const std::function<Status()>& still_hopeful) {
  std::unique_lock lock(mutex_);
  const auto look = [&] {
    lock.unlock();
    const Status hopeful =
        options_.interrupted() ? Status{StatusCode::kClosed, "interrupted"} : still_hopeful();
    lock.lock();
    return hopeful;
  };
  while (asking_ > 0) {
    changed_.wait_for(lock, kLook);
    if (asking_ == 0) break;
    if (Status hopeful = look(); !hopeful.ok()) return hopeful;
  }
  const Counted one_at_a_time{asking_, changed_, lock};
  std::uint32_t asked_in = 0;  // life_ counts from 1
  answer_.reset();
  // Also an extent that has been opened before, by a caller that then failed, gets an answer.
  if (const auto* const open = std::get_if<wire::OpenStream>(&request))
    ready_[index(open->stream)] &= ~(std::uint64_t{1} << raw(open->extent));
  for (;;) {
    if (!failure_.ok()) return failure_;
    if (answer_ && !answers(request, *answer_)) answer_.reset();
    if (answer_) {
      if (auto* const refused = std::get_if<wire::Refused>(&*answer_))
        return Status{refused->code, refused->text};
      return *std::exchange(answer_, std::nullopt);
    }
    if (connected_ && asked_in != life_) {
      asked_in = life_;
      // A failed send shows as a lost connection: the thread attaches again, and we ask again.
      if (Status sent = send(request, fds); sent.code() == StatusCode::kInternal) return sent;
    }
    changed_.wait_for(lock, kLook);
    if (answer_ || !failure_.ok()) continue;
    if (Status hopeful = look(); !hopeful.ok()) return hopeful;
  }
}

Status Session::close(nanoseconds timeout) {
  if (::getpid() != process_ || thread_ == nullptr) return {};
  Status result;
  const Deadline deadline = Deadline::after(timeout);
  const auto answer = ask(wire::Detach{}, {}, [&]() -> Status {
    if (!deadline.passed()) return {};
    return {
        StatusCode::kTimeout,
        formatted("rank {} left without an answer: its last pushes were not applied within {} s",
                  raw(options_.rank), to_seconds(timeout))};
  });
  if (!answer.ok() && answer.status().code() != StatusCode::kClosed) result = answer.status();
  thread_->request_stop();
  ::eventfd_write(nudge_.get(), 1);
  thread_.reset();
  const std::scoped_lock lock(mutex_);
  if (failure_.ok()) failure_ = {StatusCode::kClosed, "this session is closed"};
  return result;
}

void Session::ring() noexcept {
  // Pairs with the server's store of 1 before its last look (see shm::Server::sleep_or_poll).
  if (control_->server_sleeps.load(std::memory_order_seq_cst) == 0) return;
  const std::scoped_lock lock(mutex_);
  if (doorbell_) ::eventfd_write(doorbell_.get(), 1);
}

Status Session::failure() const {
  const std::scoped_lock lock(mutex_);
  return failure_;
}

Status Session::check_server(TimePoint waiting_since, nanoseconds timeout) const {
  if (options_.interrupted()) return {StatusCode::kClosed, "interrupted"};
  bool reconnecting = false;
  {
    const std::scoped_lock lock(mutex_);
    if (!failure_.ok()) return failure_;
    reconnecting = !connected_;
  }
  const TimePoint sign =
      from_nanoseconds(control_->last_sign_of_life.load(std::memory_order_relaxed));
  const auto silent = Clock::now() - std::max(sign, waiting_since);
  if (silent < timeout + (reconnecting ? kGrace : nanoseconds{0})) return {};
  return {StatusCode::kTimeout,
          formatted("the server of this job (process {} on host {}) has given no sign of life for "
                    "{:.1f} s; see {}",
                    control_->server_process.load(std::memory_order_relaxed), host_name(),
                    to_seconds(silent), shm::log_path(options_.job_dir))};
}

std::shared_ptr<Segment> Session::segment(store::SegmentKind kind, ExtentId extent) const {
  const std::scoped_lock lock(mutex_);
  return held_.find(kind, extent);
}

std::shared_ptr<Segment> Session::segment(SegmentId id) const {
  const std::scoped_lock lock(mutex_);
  return held_.find(id);
}

bool Session::provides(StreamId stream, StreamExtent extent) const {
  const std::scoped_lock lock(mutex_);
  return (provided_[index(stream)] >> raw(extent) & 1) != 0;
}

void Session::fail(Status status) {
  {
    const std::scoped_lock lock(mutex_);
    if (failure_.ok()) failure_ = std::move(status);
    connected_ = false;
  }
  wake_waiters();
}

void Session::wake_waiters() noexcept {
  changed_.notify_all();
  if (mailbox_ == nullptr) return;
  for (store::MailStream& mail : mailbox_->streams) notify(mail.wake);
}

}  // namespace psplus::worker
