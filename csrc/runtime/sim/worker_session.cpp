// How a simulated worker attaches, holds segments and comes back to a new server.

#include "base/format.hpp"

#include <utility>

#include "runtime/sim/world.hpp"

namespace psplus::sim {

Worker::Worker(World& world, Random random, Rank rank, std::uint32_t process, std::uint64_t dies_at)
    : Actor(world.scheduler()),
      world_(world),
      random_(random),
      rank_(rank),
      process_(process),
      dies_at_(dies_at) {}

void Worker::begin(nanoseconds delay) { start(live(), delay); }

void Worker::kill() {
  stop();
  finished(std::make_exception_ptr(Killed{}));
}

std::vector<store::SegmentHandle> Worker::held_segments() const {
  std::vector<store::SegmentHandle> segments;
  for (const auto& [id, segment] : held_) segments.push_back(segment);
  return segments;
}

void Worker::connect() {
  link_ = world_.connect(*this);
  if (link_ == nullptr) return;  // told when there is a server
  if (attached_) {
    send(wire::Resume{.protocol = wire::kProtocolVersion,
                      .job = job_,
                      .member = member_,
                      .incarnation = incarnation_});
    return;
  }
  held_.clear();
  send(wire::Attach{.protocol = wire::kProtocolVersion,
                    .rank = rank_,
                    .world_size = world_.scenario().workers,
                    .process = process_});
}

/// The server closes every stream of a worker that it counts out, used or not.
bool Worker::counted_out() const noexcept {
  const std::uint64_t unused =
      mailbox_->streams[store::kMaxStreams - 1].published.load(std::memory_order_acquire);
  return (unused & store::PushMark::kClosed) != 0;
}

bool Worker::may_still_publish() const noexcept {
  return !detaching_ && !session_failed_ && !counted_out();
}

bool Worker::may_hand_over() const noexcept { return attached() && (detaching_ || !counted_out()); }

void Worker::server_is_up() {
  if (frozen()) {
    scheduler_.at(frozen_until(), [this] { server_is_up(); });
    return;
  }
  if (running() && link_ == nullptr && doing_ != "starting" && !session_failed_) connect();
}

void Worker::send(const wire::ToServer& message, std::vector<std::byte> layout) {
  if (link_ == nullptr) return;
  world_.send_to_server(link_,
                        {.bytes = wire::encode(message), .layout = std::move(layout), .blob = {}});
}

void Worker::link_lost(const LinkPtr& link) {
  if (!running() || link != link_) return;
  if (frozen()) {
    scheduler_.at(frozen_until(), [this, link] { link_lost(link); });
    return;
  }
  link_->open_at_worker = false;
  link_ = nullptr;
  connected_ = false;
  if (!session_failed_) connect();
  notify();
}

void Worker::deliver(const LinkPtr& link, ToWorkerMail mail) {
  if (!running() || link != link_ || !link->open_at_worker) return;
  if (frozen()) {
    scheduler_.at(frozen_until(), [this, link, mail = std::move(mail)] { deliver(link, mail); });
    return;
  }
  const auto message = wire::decode_to_worker(mail.bytes);
  if (!message.ok()) return world_.checker().fail("protocol", message.status().message());
  take(*message, std::move(mail.segments));
}

void Worker::take(const wire::ToWorker& message, std::vector<store::SegmentHandle> segments) {
  world_.note("rank {} takes message {}", raw(rank_), message.index());
  if (const auto* const m = std::get_if<wire::Welcome>(&message)) {
    epoch_ = m->epoch;
    offered_ = {segments.at(0).header().id};
    if (attached_) return;
    member_ = m->member;
    incarnation_ = m->incarnation;
    job_ = m->job;
    control_ = reinterpret_cast<const store::ControlBlock*>(segments.at(0).bytes.data());
    held_[segments.at(0).header().id] = segments.at(0);
    return;
  }
  if (const auto* const m = std::get_if<wire::Offer>(&message)) {
    held_[m->segment] = segments.at(0);
    offered_.insert(m->segment);
    send(wire::Holding{m->segment});
    return;
  }
  if (const auto* const m = std::get_if<wire::Drop>(&message)) {
    held_.erase(m->segment);
    return;
  }
  if (std::holds_alternative<wire::Attached>(message)) {
    std::erase_if(held_, [this](const auto& entry) { return !offered_.contains(entry.first); });
    mailbox_ = reinterpret_cast<store::MailboxBlock*>(
        own_segment(store::SegmentKind::kMailbox, ExtentId{}).data());
    if (mailbox_ == nullptr)
      return world_.checker().fail("protocol", "a worker was attached without a mailbox");
    attached_ = connected_ = true;
    ++attachments_;
    notify();
    return;
  }
  if (const auto* const m = std::get_if<wire::StreamReady>(&message)) {
    const std::uint64_t bit = std::uint64_t{1} << raw(m->extent);
    for (Stream& stream : streams_) {
      if (stream.id != m->stream) continue;
      if (m->provides) stream.provides |= bit;
      if ((std::exchange(stream.ready, stream.ready | bit) & bit) == 0) continue;
      notify();  // no answer: it is this worker's turn to provide
      return;
    }
  }
  if (const auto* const m = std::get_if<wire::Refused>(&message))
    world_.note("rank {} is refused: {}", raw(rank_), m->text);
  if (const auto* const m = std::get_if<wire::Refused>(&message); m != nullptr && m->fatal) {
    session_failed_ = true;
    leave_checker();
  }
  answer_ = message;
  notify();
}

std::span<std::byte> Worker::own_segment(store::SegmentKind kind, ExtentId extent) const {
  if (kind == store::SegmentKind::kShard) {
    const auto shard = held_.find(SegmentId{control_->extents[index(extent)].shard_segment.load()});
    return shard == held_.end() ? std::span<std::byte>{} : shard->second.bytes;
  }
  for (auto entry = held_.rbegin(); entry != held_.rend(); ++entry) {
    const store::SegmentHandle& segment = entry->second;
    const store::SegmentHeader& header = segment.header();
    if (header.kind != kind) continue;
    if (header.owner == raw(member_) && header.incarnation == incarnation_ &&
        (kind == store::SegmentKind::kMailbox || header.extent == raw(extent)))
      return segment.bytes;
  }
  return {};
}

Task Worker::attach() {
  doing_ = "attaching";
  connect();
  co_await wait_for("attaching", [this] { return attached_; });
}

Task Worker::ask(wire::ToServer request, std::vector<std::byte> layout) {
  answer_.reset();
  std::uint64_t asked_in = 0;
  for (;;) {
    if (answer_) {
      if (std::holds_alternative<wire::Refused>(*answer_)) throw Failed{};
      co_return;
    }
    if (session_failed_) throw Failed{};
    if (connected_ && asked_in != attachments_) {
      asked_in = attachments_;
      send(request, layout);
    }
    co_await parked();
  }
}

Task Worker::detach() {
  detaching_ = true;
  leave_checker();
  doing_ = "detaching";
  try {
    co_await ask(wire::Detach{});
  } catch (const Failed&) {
    // Its server died while it was leaving: nobody waits for it any more.
  }
  attached_ = false;
}

void Worker::leave_checker() {
  if (control_ == nullptr) return;
  for (const Stream& stream : streams_) world_.checker().left(stream.id, life());
}

void Worker::ring() {
  if (link_ == nullptr || control_->server_sleeps.load(std::memory_order_seq_cst) == 0) return;
  world_.ring_doorbell(link_->server_life);
}

void Worker::finished(std::exception_ptr error) {
  bool by_kill = false;
  bool failed = false;
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (const Killed&) {
      by_kill = true;
    } catch (const Failed&) {
      failed = true;
    }
  }
  leave_checker();
  attached_ = false;
  // Until now it could have handed its segments on; from here they are gone with it.
  held_.clear();
  world_.worker_has_ended(*this, by_kill || failed);
  if (link_ != nullptr) link_->open_at_worker = false;
}

}  // namespace psplus::sim
