#include "collectives/messages.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include <pthread.h>

#include "base/format.hpp"
#include "collectives/pieces.hpp"

namespace psplus::collectives {
namespace {

/// Precedes a message in a ring; frames begin at multiples of its size, so it never wraps around.
struct FrameHeader {
  std::uint64_t bytes;
  std::int32_t tag;
  std::uint32_t reserved;
};
static_assert(sizeof(FrameHeader) == 16);
constexpr std::size_t kFrame = sizeof(FrameHeader);

constexpr std::size_t padding_of(std::size_t bytes) { return (kFrame - bytes % kFrame) % kFrame; }

Status timed_out(std::string_view what, std::string_view with) {
  return {StatusCode::kTimeout, formatted("{} timed out waiting for {}", what, with)};
}

}  // namespace

/// One direction between two ranks, seen from either end.
class Messages::Ring {
 public:
  Ring(RingWords& words, std::byte* base, std::size_t capacity)
      : words_(words), base_(base), capacity_(capacity) {}

  /// For the sender: bytes that fit. Acquire: the receiver has read what stood there.
  [[nodiscard]] std::size_t room() const {
    return capacity_ - (words_.head.load(std::memory_order_relaxed) -
                        words_.tail.load(std::memory_order_acquire));
  }
  /// For the receiver: bytes that are there. Acquire: the sender has written them.
  [[nodiscard]] std::size_t available() const {
    return words_.head.load(std::memory_order_acquire) -
           words_.tail.load(std::memory_order_relaxed);
  }
  void write(const void* data, std::size_t bytes) {
    const std::uint64_t head = words_.head.load(std::memory_order_relaxed);
    const std::size_t at = head % capacity_;
    const std::size_t first = std::min(bytes, capacity_ - at);
    if (first != 0) std::memcpy(base_ + at, data, first);
    if (bytes != first)
      std::memcpy(base_, static_cast<const std::byte*>(data) + first, bytes - first);
    words_.head.store(head + bytes, std::memory_order_release);
  }
  /// Leaves bytes out that the receiver skips as well.
  void skip_written(std::size_t bytes) {
    words_.head.store(words_.head.load(std::memory_order_relaxed) + bytes,
                      std::memory_order_release);
  }
  /// `out` is null for bytes that nobody wants.
  void read(void* out, std::size_t bytes) {
    const std::uint64_t tail = words_.tail.load(std::memory_order_relaxed);
    const std::size_t at = tail % capacity_;
    const std::size_t first = std::min(bytes, capacity_ - at);
    if (out != nullptr && first != 0) std::memcpy(out, base_ + at, first);
    if (out != nullptr && bytes != first)
      std::memcpy(static_cast<std::byte*>(out) + first, base_, bytes - first);
    words_.tail.store(tail + bytes, std::memory_order_release);
  }
  /// Long messages move in steps of a quarter, so that both ends copy at the same time.
  [[nodiscard]] std::size_t step() const { return capacity_ / 4; }

 private:
  RingWords& words_;
  std::byte* base_;
  std::size_t capacity_;
};

Messages::Messages(Group& group)
    : group_(group), sends_(group.size()), current_(group.size()), kept_(group.size()) {}

Messages::Ring Messages::outgoing(std::size_t to) const {
  const GroupMemory& memory = group_.memory();
  const std::size_t own = index(group_.rank());
  return {memory.ring_words(own, to), memory.ring(own, to), memory.ring_bytes()};
}

Messages::Ring Messages::incoming(std::size_t from) const {
  const GroupMemory& memory = group_.memory();
  const std::size_t own = index(group_.rank());
  return {memory.ring_words(from, own), memory.ring(from, own), memory.ring_bytes()};
}

void Messages::send(Rank to, Tag tag, const void* data, std::size_t bytes, Deadline deadline,
                    Completion done) {
  check_rank(group_, to);
  std::unique_lock lock{mutex_};
  if (closed_) {
    lock.unlock();
    done({StatusCode::kClosed, "the group was shut down"}, to);
    return;
  }
  sends_[index(to)].push_back({.to = index(to),
                               .tag = tag,
                               .data = static_cast<const std::byte*>(data),
                               .bytes = bytes,
                               .deadline = deadline,
                               .done = std::move(done)});
  submitted(std::move(lock));
}

void Messages::receive(std::optional<Rank> from, Tag tag, void* data, std::size_t bytes,
                       Deadline deadline, Completion done) {
  if (from) check_rank(group_, *from);
  std::unique_lock lock{mutex_};
  if (closed_) {
    lock.unlock();
    done({StatusCode::kClosed, "the group was shut down"}, from.value_or(group_.rank()));
    return;
  }
  Receive made{.from = std::nullopt,
               .tag = tag,
               .data = static_cast<std::byte*>(data),
               .bytes = bytes,
               .deadline = deadline,
               .done = std::move(done)};
  if (from) made.from = index(*from);
  receives_.push_back(std::make_shared<Receive>(std::move(made)));
  submitted(std::move(lock));
}

void Messages::submitted(std::unique_lock<std::mutex> lock) {
  std::vector<Finished> finished;
  progress(finished);
  const bool wait = !idle();
  if (wait && !thread_.joinable()) thread_ = std::thread{[this] { run(); }};
  lock.unlock();
  tell(finished);
  if (wait) notify(group_.own().messages);  // the thread may sleep towards a later deadline
}

void Messages::help() {
  std::vector<Finished> finished;
  if (std::unique_lock lock{mutex_, std::try_to_lock}; lock.owns_lock()) progress(finished);
  tell(finished);
}

void Messages::tell(std::vector<Finished>& finished) {
  for (Finished& one : finished) one.done(one.status, one.peer);
  finished.clear();
}

void Messages::progress(std::vector<Finished>& finished) {
  for (std::size_t to = 0; to < sends_.size(); ++to) push_out(to, finished);
  deliver_kept(finished);
  for (std::size_t from = 0; from < current_.size(); ++from) take_in(from, finished);
}

void Messages::push_out(std::size_t to, std::vector<Finished>& finished) {
  auto& queue = sends_[to];
  if (queue.empty()) return;
  Ring ring = outgoing(to);
  bool moved = false;
  while (!queue.empty()) {
    Send& send = queue.front();
    if (!send.started) {
      if (ring.room() < kFrame) break;
      const FrameHeader header{send.bytes, static_cast<std::int32_t>(send.tag), 0};
      ring.write(&header, kFrame);
      send.started = moved = true;
    }
    while (send.sent < send.bytes) {
      const std::size_t n = std::min({send.bytes - send.sent, ring.room(), ring.step()});
      if (n == 0) break;
      ring.write(send.data + send.sent, n);
      send.sent += n;
      moved = true;
      if (send.sent < send.bytes) notify(group_.memory().words(to).messages);
    }
    // The padding after the last byte must fit as well, or the next frame would not be aligned.
    const std::size_t padding = padding_of(send.bytes);
    if (send.sent < send.bytes || ring.room() < padding) break;
    ring.skip_written(padding);
    finished.push_back({std::move(send.done), {}, static_cast<Rank>(to)});
    queue.pop_front();
    moved = true;
  }
  if (moved) notify(group_.memory().words(to).messages);
}

std::shared_ptr<Messages::Receive> Messages::match(std::size_t from, Tag tag) {
  for (const auto& receive : receives_)
    if (!receive->started && receive->tag == tag && (!receive->from || *receive->from == from))
      return receive;
  return nullptr;
}

bool Messages::wanted(std::size_t from) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const auto& receive) { return !receive->from || *receive->from == from; });
}

void Messages::remove(const Receive& receive) {
  receives_.remove_if([&](const auto& other) { return other.get() == &receive; });
}

void Messages::complete(std::shared_ptr<Receive> receive, Status status, std::size_t from,
                        std::vector<Finished>& finished) {
  remove(*receive);
  finished.push_back({std::move(receive->done), std::move(status), static_cast<Rank>(from)});
}

namespace {

Status check_size(std::size_t from, std::size_t arrived, std::size_t expected) {
  if (arrived == expected) return {};
  return {StatusCode::kConfig,
          formatted("a message of {} bytes came from rank {} for a receive of {} bytes; both ends "
                    "must name the same shape and dtype",
                    arrived, from, expected)};
}

}  // namespace

void Messages::take_in(std::size_t from, std::vector<Finished>& finished) {
  if (!current_[from] && !wanted(from)) return;
  Ring ring = incoming(from);
  bool moved = false;
  for (;;) {
    if (!current_[from]) {
      if (!wanted(from) || ring.available() < kFrame) break;
      FrameHeader header{};
      ring.read(&header, kFrame);
      Incoming message;
      message.tag = Tag{header.tag};
      message.bytes = header.bytes;
      message.target = match(from, message.tag);
      if (message.target)
        message.target->started = true;
      else
        message.kept.resize(message.bytes);
      current_[from] = std::move(message);
      moved = true;
    }
    Incoming& message = *current_[from];
    const bool fits = message.target && message.target->bytes == message.bytes;
    while (message.arrived < message.bytes) {
      const std::size_t n =
          std::min({message.bytes - message.arrived, ring.available(), ring.step()});
      if (n == 0) break;
      std::byte* out = nullptr;
      if (!message.target)
        out = message.kept.data() + message.arrived;
      else if (fits)
        out = message.target->data + message.arrived;
      ring.read(out, n);
      message.arrived += n;
      moved = true;
      if (message.arrived < message.bytes) notify(group_.memory().words(from).messages);
    }
    const std::size_t padding = padding_of(message.bytes);
    if (message.arrived < message.bytes || ring.available() < padding) break;
    ring.read(nullptr, padding);
    if (message.target) {
      Status status = check_size(from, message.bytes, message.target->bytes);
      complete(std::move(message.target), std::move(status), from, finished);
    } else {
      kept_[from].push_back(std::move(message));
    }
    current_[from].reset();
    moved = true;
  }
  if (moved) notify(group_.memory().words(from).messages);
}

bool Messages::deliver_kept_from(std::size_t from, Receive& receive,
                                 std::vector<Finished>& finished) {
  auto& kept = kept_[from];
  const auto found = std::find_if(kept.begin(), kept.end(),
                                  [&](const Incoming& m) { return m.tag == receive.tag; });
  if (found == kept.end()) {
    // A message of this tag that is still coming in must not be overtaken by a later one.
    if (current_[from] && !current_[from]->target && current_[from]->tag == receive.tag &&
        current_[from]->bytes == receive.bytes) {
      Incoming& message = *current_[from];
      for (const auto& other : receives_)
        if (other.get() == &receive) message.target = other;
      if (message.arrived != 0) std::memcpy(receive.data, message.kept.data(), message.arrived);
      message.kept = {};
      receive.started = true;
    }
    return false;
  }
  Status status = check_size(from, found->bytes, receive.bytes);
  if (status.ok() && found->bytes != 0) std::memcpy(receive.data, found->kept.data(), found->bytes);
  finished.push_back({std::move(receive.done), std::move(status), static_cast<Rank>(from)});
  kept.erase(found);
  return true;
}

void Messages::deliver_kept(std::vector<Finished>& finished) {
  for (auto it = receives_.begin(); it != receives_.end();) {
    Receive& receive = **it;
    bool delivered = false;
    for (std::size_t from = 0; from < kept_.size() && !delivered && !receive.started; ++from)
      if (!receive.from || *receive.from == from)
        delivered = deliver_kept_from(from, receive, finished);
    it = delivered ? receives_.erase(it) : std::next(it);
  }
}

bool Messages::idle() const {
  return receives_.empty() &&
         std::all_of(sends_.begin(), sends_.end(), [](const auto& queue) { return queue.empty(); });
}

void Messages::fail_hopeless(std::vector<Finished>& finished) {
  const Status aborted = group_.status();
  for (std::size_t to = 0; to < sends_.size(); ++to) {
    auto& queue = sends_[to];
    const auto lost = group_.why_lost(static_cast<Rank>(to));
    while (!queue.empty()) {
      Send& send = queue.front();
      Status status = aborted;
      if (status.ok() && lost)
        status = {StatusCode::kPeerLost, *lost + " before it took a message"};
      if (status.ok() && send.deadline.passed()) {
        status = timed_out("send", formatted("rank {}", to));
        // Half a message stands in the ring; what follows could not be read.
        if (send.started) status = group_.give_up(status.code(), Rank(to), status.message());
      }
      if (status.ok()) break;
      finished.push_back({std::move(send.done), std::move(status), static_cast<Rank>(to)});
      queue.pop_front();
    }
  }
  const auto receives = receives_;  // complete() removes from the list
  for (const auto& receive : receives) {
    Status status = aborted;
    std::size_t peer = receive->from.value_or(index(group_.rank()));
    for (std::size_t from = 0; from < current_.size(); ++from)
      if (current_[from] && current_[from]->target == receive) peer = from;
    const bool any = !receive->from && !receive->started;
    std::size_t lost_ranks = 0;
    for (std::size_t from = 0; from < current_.size() && status.ok(); ++from) {
      if (!any && from != peer) continue;
      if (from == index(group_.rank())) continue;
      const auto lost = group_.why_lost(static_cast<Rank>(from));
      // What it sent before its end counts.
      if (!lost || incoming(from).available() != 0) continue;
      ++lost_ranks;
      if (!any || lost_ranks + 1 == group_.size())
        status = {StatusCode::kPeerLost, *lost + " before it sent a message"};
    }
    if (status.ok() && receive->deadline.passed()) {
      status = timed_out("receive", any ? "any rank" : formatted("rank {}", peer));
      if (receive->started)
        status = group_.give_up(status.code(), static_cast<Rank>(peer), status.message());
    }
    if (status.ok()) continue;
    for (auto& message : current_)
      if (message && message->target == receive) {  // the rest of it goes nowhere
        message->target.reset();
        message->kept.resize(message->bytes);
      }
    complete(receive, std::move(status), peer, finished);
  }
}

Deadline Messages::next_look() const {
  Deadline next = Deadline::after(kLivenessInterval);
  const auto sooner = [&](Deadline other) {
    if (other.at() < next.at()) next = other;
  };
  for (const auto& queue : sends_)
    if (!queue.empty()) sooner(queue.front().deadline);
  for (const auto& receive : receives_) sooner(receive->deadline);
  return next;
}

void Messages::run() {
  ::pthread_setname_np(::pthread_self(), "psplus-messages");
  WakeWord& bell = group_.own().messages;
  std::vector<Finished> finished;
  for (;;) {
    const std::uint32_t seen = bell.sequence.load(std::memory_order_seq_cst);
    Deadline next = Deadline::after(std::chrono::hours{24});
    {
      const std::lock_guard lock{mutex_};
      if (stop_) break;
      try {
        progress(finished);
        if (!idle()) {
          fail_hopeless(finished);
          next = next_look();
        }
      } catch (const std::exception& error) {  // no memory for a message that is kept aside
        group_.abort();
      }
    }
    tell(finished);
    (void)wait_until(bell, next,
                     [&] { return bell.sequence.load(std::memory_order_seq_cst) != seen; });
  }
}

void Messages::shutdown() noexcept {
  std::vector<Finished> finished;
  {
    const std::lock_guard lock{mutex_};
    closed_ = stop_ = true;
    const Status closed{StatusCode::kClosed, "the group was shut down"};
    for (auto& queue : sends_) {
      for (Send& send : queue)
        finished.push_back({std::move(send.done), closed, static_cast<Rank>(send.to)});
      queue.clear();
    }
    for (const auto& receive : receives_)
      finished.push_back({std::move(receive->done), closed, group_.rank()});
    receives_.clear();
    for (auto& message : current_) message.reset();
  }
  notify(group_.own().messages);
  if (thread_.joinable()) thread_.join();
  tell(finished);
}

}  // namespace psplus::collectives
