#include "runtime/shm/server.hpp"

#include <algorithm>
#include <cerrno>
#include <random>
#include <utility>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/format.hpp"
#include "base/futex.hpp"
#include "base/memory_limits.hpp"
#include "runtime/shm/job_files.hpp"
#include "runtime/shm/survivors.hpp"

namespace psplus::shm {
namespace {

using server::ConnectionId;

// Keys of the poller: two fixed ones, then two for each connection.
constexpr std::uint64_t kListenerKey = 0;
constexpr std::uint64_t kDoorbellKey = 1;
constexpr std::uint64_t socket_key(ConnectionId id) { return raw(id) * 2; }
constexpr std::uint64_t process_key(ConnectionId id) { return raw(id) * 2 + 1; }
constexpr ConnectionId connection_of(std::uint64_t key) { return ConnectionId{key / 2}; }

constexpr nanoseconds kTick = milliseconds{200};
constexpr nanoseconds kLockPatience = std::chrono::seconds{5};
/// Work between two looks at the sockets: about a millisecond.
constexpr std::size_t kSliceBytes = 4 << 20;
/// A layout names every parameter; a blob holds an optimizer's state.
constexpr std::uint64_t kMaxLayoutBytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxBlobBytes = std::uint64_t{1} << 40;

std::uint64_t random_job_number() {
  std::random_device device;
  const std::uint64_t high = device();
  return (high << 32 | device()) | 1;  // never 0
}

Result<std::vector<std::byte>> read_whole(const UniqueFd& fd, std::uint64_t size,
                                          std::string_view what) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return Status::from_errno("fstat", what, errno);
  if (static_cast<std::uint64_t>(info.st_size) < size)
    return Status{StatusCode::kInternal, formatted("{} is cut short", what)};
  if (Status room = check_memory_available(what, size); !room.ok()) return room;
  std::vector<std::byte> bytes(size);
  std::uint64_t done = 0;
  while (done < size) {
    // Reading, not mapping: a peer that truncates its file cannot kill this process.
    const ssize_t got =
        ::pread(fd.get(), bytes.data() + done, size - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Status::from_errno("pread", what, errno);
    if (got == 0) return Status{StatusCode::kInternal, formatted("{} is cut short", what)};
    done += static_cast<std::uint64_t>(got);
  }
  return bytes;
}

}  // namespace

Server::Server(std::string job_dir, server::Config config, Logger log)
    : job_dir_(std::move(job_dir)), config_(config), log_(std::move(log)), store_(source_) {}

Server::~Server() = default;

Result<std::unique_ptr<Server>> Server::open(std::string job_dir, std::vector<UniqueFd> segments,
                                             server::Config config, Logger log) {
  std::unique_ptr<Server> server{new Server(std::move(job_dir), config, std::move(log))};
  if (Status status = server->start(std::move(segments)); !status.ok()) return status;
  return server;
}

Status Server::start(std::vector<UniqueFd> segments) {
  const bool takes_over = !segments.empty();
  if (takes_over) {
    std::vector<store::SegmentHandle> handles;
    for (UniqueFd& fd : segments) {
      auto segment = Segment::map(std::move(fd), sizeof(store::SegmentHeader), Access::kReadWrite);
      if (!segment.ok()) return segment.status();
      handles.push_back(to_handle(std::move(segment).value()));
    }
    // Before adopt(), which writes: whoever holds the lock still serves.
    for (const store::SegmentHandle& handle : handles)
      if (handle.header().kind == store::SegmentKind::kControl)
        if (Status status = lock(handle); !status.ok()) return status;
    if (Status status = store_.adopt(std::move(handles)); !status.ok()) return status;
  } else {
    if (Status status = store_.create(random_job_number()); !status.ok()) return status;
    const SegmentId control = store_.control().header.id;
    if (Status status = lock(store_.segments().at(control)); !status.ok()) return status;
  }
  store_.put(store_.control().server_process, static_cast<std::uint32_t>(::getpid()));
  store_.put(store_.control().last_sign_of_life, to_nanoseconds(Clock::now()));

  core_ = std::make_unique<server::Core>(store_, config_);
  if (takes_over) core_->recover(Clock::now());

  auto process = open_pidfd(::getpid());
  if (!process.ok()) return process.status();
  own_process_ = std::move(process).value();
  doorbell_ = UniqueFd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!doorbell_) return Status::from_errno("eventfd", "the doorbell", errno);
  epoll_ = UniqueFd{::epoll_create1(EPOLL_CLOEXEC)};
  if (!epoll_) return Status::from_errno("epoll_create1", "the server", errno);
  auto listener = UnixListener::listen(socket_path(job_dir_));
  if (!listener.ok()) return listener.status();
  listener_ = std::move(listener).value();
  if (Status status = watch(listener_.fd().get(), kListenerKey, EPOLLIN); !status.ok())
    return status;
  return watch(doorbell_.get(), kDoorbellKey, EPOLLIN);
}

Status Server::lock(const store::SegmentHandle& control) {
  const UniqueFd own{::dup(control.fd)};
  auto lock = lock_control(own, Deadline::after(kLockPatience));
  if (!lock.ok()) return lock.status();
  control_lock_ = std::move(lock).value();
  return {};
}

Status Server::watch(int fd, std::uint64_t key, std::uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return Status::from_errno("epoll_ctl", "a descriptor", errno);
  return {};
}

void Server::rewatch(ConnectionId id) {
  const Connection& connection = connections_.at(id);
  epoll_event event{};
  event.events = connection.has_queued() ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = socket_key(id);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket().fd().get(), &event);
}

Status Server::run(std::stop_token stop) {
  const std::stop_callback wake(stop, [this] { ::eventfd_write(doorbell_.get(), 1); });
  bool busy = true;
  while (!stopping_ && !stop.stop_requested()) {
    sleep_or_poll(busy);
    tick_if_due();
    core_->handle(server::Doorbell{}, Clock::now());
    busy = core_->step(kSliceBytes, Clock::now());
    carry_out_effects();
  }
  if (stopping_)
    remove_job(job_dir_);
  else
    ::unlink(socket_path(job_dir_).c_str());
  return {};
}

/// Before a worker hears that it is attached or detached: who is listed is waited for after a
/// crash.
void Server::list_workers() {
  std::vector<std::uint32_t> processes;
  for (const store::MemberEntry& member : store_.control().members)
    if (static_cast<store::MemberState>(member.state.load(std::memory_order_relaxed)) ==
        store::MemberState::kLive)
      processes.push_back(member.process.load(std::memory_order_relaxed));
  if (Status status = write_workers(job_dir_, processes); !status.ok()) log_(status.message());
}

void Server::sleep_or_poll(bool busy) {
  int timeout = 0;
  store::HalfWord& sleeps = store_.control().server_sleeps;
  if (!busy) {
    // Announce, then look once more, then sleep: a publisher either is seen here or sees the word
    // and rings. Sequentially consistent on both sides (see worker::Doorbell).
    sleeps.store(1, std::memory_order_seq_cst);
    core_->handle(server::Doorbell{}, Clock::now());
    busy = core_->step(kSliceBytes, Clock::now());
    carry_out_effects();
    const auto until_tick = std::chrono::ceil<milliseconds>(next_tick_ - Clock::now()).count();
    timeout = busy || stopping_ ? 0 : static_cast<int>(std::max<std::int64_t>(until_tick, 0));
  }
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, timeout);
  sleeps.store(0, std::memory_order_relaxed);
  for (int i = 0; i < count; ++i) on_ready(events[i].data.u64, events[i].events);
  carry_out_effects();
}

void Server::on_ready(std::uint64_t key, std::uint32_t events) {
  if (key == kListenerKey) return accept_all();
  if (key == kDoorbellKey) {
    eventfd_t rings = 0;
    ::eventfd_read(doorbell_.get(), &rings);
    return;
  }
  const ConnectionId id = connection_of(key);
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;  // lost by an earlier event of this round
  if (key == process_key(id)) {
    receive_all(id);  // a Detach may still be in its socket
    return lose(id);
  }
  if ((events & EPOLLOUT) != 0) {
    if (!found->second.flush().ok()) return lose(id);
    if (found->second.closing && !found->second.has_queued()) {
      forget(id);
      return;
    }
    rewatch(id);
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive_all(id);
}

void Server::accept_all() {
  for (;;) {
    auto socket = listener_.accept();
    if (!socket.ok()) {
      if (socket.status().code() == StatusCode::kBusy) return;
      // Out of descriptors, say. Who waits there waits until the next tick; looking again at once
      // would leave no time for anybody else.
      log_(socket.status().message());
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.fd().get(), nullptr);
      accepts_ = false;
      return;
    }
    const ConnectionId id{next_connection_++};
    const int fd = socket->fd().get();
    connections_.emplace(id, Connection{std::move(socket).value()});
    if (Status status = watch(fd, socket_key(id), EPOLLIN); !status.ok()) {
      log_(status.message());
      forget(id);
    }
  }
}

void Server::receive_all(ConnectionId id) {
  const Deadline now{Clock::now()};
  for (;;) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    auto message = found->second.socket().receive(now);
    if (message.ok()) {
      receive(id, std::move(message).value());
      carry_out_effects();
      continue;
    }
    if (message.status().code() == StatusCode::kBusy) return;
    if (message.status().code() != StatusCode::kPeerLost) log_(message.status().message());
    return lose(id);
  }
}

void Server::receive(ConnectionId id, UnixMessage message) {
  auto decoded = wire::decode_to_server(message.bytes);
  if (!decoded.ok()) {
    log_(decoded.status().message());
    return lose(id);
  }
  server::Received event{.from = id, .message = std::move(*decoded), .layout = {}, .blob = {}};
  const bool introduces = std::holds_alternative<wire::Attach>(event.message) ||
                          std::holds_alternative<wire::Resume>(event.message);
  Connection& connection = connections_.at(id);
  if (introduces) {
    if (message.fds.size() != 1 || connection.process) {
      log_("a worker attached without its pidfd, or twice");
      return lose(id);
    }
    connection.process = std::move(message.fds.front());
    if (Status status = watch(connection.process.get(), process_key(id), EPOLLIN); !status.ok()) {
      log_(status.message());
      return lose(id);
    }
  }
  if (const auto* const open = std::get_if<wire::OpenStream>(&event.message)) {
    const std::size_t expected = open->has_blob ? 2 : 1;
    if (message.fds.size() != expected || open->layout_bytes > kMaxLayoutBytes ||
        open->blob_bytes > kMaxBlobBytes) {
      log_("a damaged request to open a stream");
      return lose(id);
    }
    auto layout = read_whole(message.fds[0], open->layout_bytes, "a layout");
    auto blob = open->has_blob ? read_whole(message.fds[1], open->blob_bytes, "a blob")
                               : Result<std::vector<std::byte>>(std::vector<std::byte>{});
    if (!layout.ok() || !blob.ok()) {
      const Status& why = (layout.ok() ? blob : layout).status();
      log_(why.message());
      if (why.code() != StatusCode::kNoSpace) return lose(id);
      server::Send refusal{
          .to = id, .message = wire::Refused{why.code(), false, why.message()}, .segments = {}};
      return carry_out(refusal);
    }
    event.layout = std::move(layout).value();
    event.blob = std::move(blob).value();
  }
  core_->handle(event, Clock::now());
}

/// Who sent the process's descriptor may keep it open: its description would stay watched when only
/// ours were closed, and be ready for ever once that process ends.
bool Server::forget(ConnectionId id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return false;
  if (const UniqueFd& process = found->second.process)
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, process.get(), nullptr);
  connections_.erase(found);
  return true;
}

void Server::lose(ConnectionId id) {
  if (!forget(id)) return;
  core_->handle(server::Lost{id}, Clock::now());
  carry_out_effects();
  list_workers();
}

void Server::carry_out_effects() {
  for (server::Effect& effect : core_->take_effects()) {
    if (auto* const send = std::get_if<server::Send>(&effect)) {
      if (std::holds_alternative<wire::Attached>(send->message) ||
          std::holds_alternative<wire::Detached>(send->message))
        list_workers();
      carry_out(*send);
    } else if (const auto* const wake = std::get_if<server::Wake>(&effect)) {
      if (store_.has_mailbox(wake->member)) notify(store_.mail(wake->member, wake->stream).wake);
    } else if (const auto* const drop = std::get_if<server::Disconnect>(&effect)) {
      const auto found = connections_.find(drop->connection);
      if (found == connections_.end()) continue;
      if (found->second.has_queued())
        found->second.closing = true;
      else
        forget(drop->connection);
    } else if (const auto* const line = std::get_if<server::Log>(&effect)) {
      log_(line->text);
    } else {
      stopping_ = true;
    }
  }
}

void Server::carry_out(server::Send& send) {
  const auto found = connections_.find(send.to);
  if (found == connections_.end()) return;
  std::vector<int> fds;
  std::vector<std::shared_ptr<const void>> owners;
  for (const SegmentId id : send.segments) {
    const auto segment = store_.segments().find(id);
    if (segment == store_.segments().end()) return;  // dropped since: nobody needs it
    fds.push_back(segment->second.fd);
    owners.push_back(segment->second.owner);
  }
  if (std::holds_alternative<wire::Welcome>(send.message)) {
    fds.push_back(own_process_.get());
    fds.push_back(doorbell_.get());
  }
  const bool had_queued = found->second.has_queued();
  const Status status =
      found->second.send(wire::encode(send.message), std::move(fds), std::move(owners));
  // A broken connection is noticed by its reader, which knows what to do about it.
  if (!status.ok()) log_(status.message());
  if (found->second.has_queued() != had_queued) rewatch(send.to);
}

void Server::tick_if_due() {
  const TimePoint now = Clock::now();
  store_.control().last_sign_of_life.store(to_nanoseconds(now), std::memory_order_relaxed);
  if (now < next_tick_) return;
  next_tick_ = now + kTick;
  if (!accepts_) accepts_ = watch(listener_.fd().get(), kListenerKey, EPOLLIN).ok();
  core_->handle(server::Tick{}, now);
}

}  // namespace psplus::shm
