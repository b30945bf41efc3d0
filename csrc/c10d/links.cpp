#include "c10d/links.hpp"

#include <algorithm>
#include <utility>

#include "base/format.hpp"

namespace psplus::pg {
namespace {

constexpr int kTag = 0;

/// For Gloo, to which zero means something else.
milliseconds left(Deadline deadline) {
  return std::max(milliseconds{1}, std::chrono::ceil<milliseconds>(
                                       deadline.at_most(std::chrono::hours{24 * 365}).left()));
}

/// Borrows the memory: Gloo lets go of it when the work is destroyed.
std::vector<at::Tensor> borrow(const void* data, std::size_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte)};
}

}  // namespace

void Links::add(Started started) {
  const std::lock_guard lock{mutex_};
  under_way_.push_back(std::move(started));
  if (!gloo_) under_way_.back().work->abort();
}

Status Links::lost(Rank peer, const std::exception& error) {
  culprit_ = peer;
  return {StatusCode::kPeerLost,
          formatted("lost the connection to {}: {}", names_[index(peer)], error.what())};
}

Status Links::start(c10d::Backend& gloo, std::span<const Outgoing> sends,
                    std::span<const Incoming> receives) {
  Rank peer{};
  try {
    for (const Incoming& message : receives) {
      if (message.bytes == 0) continue;
      auto memory = borrow(message.data, message.bytes);
      peer = message.from;
      add({gloo.recv(memory, static_cast<int>(peer), kTag), peer});
    }
    for (const Outgoing& message : sends) {
      if (message.bytes == 0) continue;
      auto memory = borrow(message.data, message.bytes);
      peer = message.to;
      add({gloo.send(memory, static_cast<int>(peer), kTag), peer});
    }
  } catch (const std::exception& error) {
    return lost(peer, error);
  }
  return {};
}

Status Links::await(const Started& started, Deadline deadline) {
  try {
    if (started.work->wait(left(deadline))) return {};
  } catch (const std::exception& error) {
    culprit_ = started.peer;
    if (deadline.passed())
      return {StatusCode::kTimeout,
              formatted("timed out waiting for {}", names_[index(started.peer)])};
    return lost(started.peer, error);
  }
  return shut_down();
}

Status Links::exchange(std::span<const Outgoing> sends, std::span<const Incoming> receives,
                       Deadline deadline, const std::function<Status()>& meanwhile) {
  std::unique_lock lock{mutex_};
  const BackendPtr gloo = gloo_;
  lock.unlock();
  if (!gloo) return shut_down();

  Status status = start(*gloo, sends, receives);
  if (status.ok() && meanwhile) status = meanwhile();
  // Only this thread adds to the list and takes from it.
  for (const Started& started : under_way_) {
    if (!status.ok()) break;
    status = await(started, deadline);
  }
  lock.lock();
  const auto ended = std::exchange(under_way_, {});
  lock.unlock();
  return status;  // destroys the works, after which Gloo does not touch the memory
}

void Links::close() noexcept {
  const std::lock_guard lock{mutex_};
  for (const Started& started : under_way_) started.work->abort();
  gloo_.reset();
}

}  // namespace psplus::pg
