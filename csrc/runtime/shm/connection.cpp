#include "runtime/shm/connection.hpp"

#include <utility>

namespace psplus::shm {

Status Connection::send(std::vector<std::byte> bytes, std::vector<int> fds,
                        std::vector<std::shared_ptr<const void>> owners) {
  queue_.push_back({std::move(bytes), std::move(fds), std::move(owners)});
  return flush();
}

Status Connection::flush() {
  const Deadline now{Clock::now()};
  while (!queue_.empty()) {
    const Queued& front = queue_.front();
    const Status status = socket_.send(front.bytes, front.fds, now);
    if (status.code() == StatusCode::kTimeout) return {};  // full: the poller calls again
    if (!status.ok()) return status;
    queue_.pop_front();
  }
  return {};
}

}  // namespace psplus::shm
