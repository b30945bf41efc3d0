#pragma once

#include <functional>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/status.hpp"
#include "base/unix_socket.hpp"
#include "runtime/shm/connection.hpp"
#include "runtime/shm/memfd_source.hpp"
#include "server/core.hpp"

namespace psplus::shm {

/// Drives a `server::Core` for the workers of one host: Unix socket, death notices, doorbell. One
/// thread; workers reach it through shared memory and wake it through an eventfd when it sleeps.
class Server {
 public:
  using Logger = std::function<void(const std::string&)>;

  /// Begins a job in `job_dir`, or takes over `segments` of a predecessor that is dead. The caller
  /// holds the server lock. Listens when it returns.
  static Result<std::unique_ptr<Server>> open(std::string job_dir, std::vector<UniqueFd> segments,
                                              server::Config config, Logger log);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Serves until the last worker has gone (ok) or `stop` is requested.
  Status run(std::stop_token stop);

 private:
  Server(std::string job_dir, server::Config config, Logger log);
  Status start(std::vector<UniqueFd> segments);
  Status lock(const store::SegmentHandle& control);
  Status watch(int fd, std::uint64_t key, std::uint32_t events) const;
  void rewatch(server::ConnectionId id);
  /// Drops a connection without a word to the core; false if there is none.
  bool forget(server::ConnectionId id);
  void sleep_or_poll(bool busy);
  void on_ready(std::uint64_t key, std::uint32_t events);
  void accept_all();
  void receive_all(server::ConnectionId id);
  void receive(server::ConnectionId id, UnixMessage message);
  void lose(server::ConnectionId id);
  void carry_out_effects();
  void carry_out(server::Send& send);
  void tick_if_due();
  void list_workers();

  const std::string job_dir_;
  const server::Config config_;
  const Logger log_;
  MemfdSource source_;
  store::Store store_;
  std::unique_ptr<server::Core> core_;
  UniqueFd control_lock_;
  UniqueFd own_process_;
  UniqueFd doorbell_;
  UniqueFd epoll_;
  UnixListener listener_;
  std::map<server::ConnectionId, Connection> connections_;
  std::uint64_t next_connection_ = 1;
  TimePoint next_tick_{};
  bool accepts_ = true;  ///< the listener is watched
  bool stopping_ = false;
};

}  // namespace psplus::shm
