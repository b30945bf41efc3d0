#include "server/roster.hpp"

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "server/gate.hpp"

namespace psplus::server {
namespace {

using store::MemberState;
using store::StreamMemberState;

constexpr std::uint32_t kLastIncarnation = 0xffff;

}  // namespace

void Roster::recover() {
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId member{m};
    switch (member_state(context_.control(), member)) {
      case MemberState::kFree:
      case MemberState::kDraining:
        break;
      case MemberState::kJoining:
        context_.store.put(context_.member(member).state, raw(MemberState::kFree));
        break;
      case MemberState::kLive:
        unresumed_[member] = context_.now + context_.config.resume_timeout;
        break;
    }
  }
}

std::optional<MemberId> Roster::member_of(ConnectionId connection) const {
  const auto found = peers_.find(connection);
  if (found == peers_.end()) return std::nullopt;
  return found->second.member;
}

std::optional<ConnectionId> Roster::connection_of(MemberId member) const {
  for (const auto& [connection, peer] : peers_)
    if (peer.member == member) return connection;
  return std::nullopt;
}

bool Roster::anybody() const { return !peers_.empty() || !unresumed_.empty() || !queue_.empty(); }

bool Roster::is_attached(Rank rank) const {
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m)
    if (member_state(context_.control(), MemberId{m}) == MemberState::kLive &&
        peek(context_.member(MemberId{m}).rank) == raw(rank))
      return true;
  return std::any_of(queue_.begin(), queue_.end(),
                     [&](const Queued& queued) { return queued.request.rank == rank; });
}

bool Roster::anybody_draining() const {
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m)
    if (member_state(context_.control(), MemberId{m}) == MemberState::kDraining) return true;
  return false;
}

void Roster::refuse(ConnectionId to, StatusCode code, std::string text, bool fatal) {
  context_.emit(Send{to, wire::Refused{code, fatal, std::move(text)}, {}});
  if (fatal) context_.emit(Disconnect{to});
}

void Roster::refuse_taken(ConnectionId to, MemberId holder) {
  refuse(
      to, StatusCode::kConfig,
      formatted("rank {} is attached already, as process {}; give each worker a RANK of its own, "
                "or this job a PSPLUS_JOB of its own",
                peek(context_.member(holder).rank), peek(context_.member(holder).process)),
      true);
}

/// The place that the rank had before, so that its counters go on; else one never used; else any.
std::optional<MemberId> Roster::place_for(Rank rank) const {
  std::optional<MemberId> unused;
  std::optional<MemberId> free;
  for (std::uint16_t m = store::kMaxMembers; m-- > 0;) {
    const store::MemberEntry& entry = context_.member(MemberId{m});
    if (member_state(context_.control(), MemberId{m}) != MemberState::kFree) continue;
    const bool used = peek(entry.incarnation) != 0;
    if (used && peek(entry.rank) == raw(rank)) return MemberId{m};
    if (!used) unused = MemberId{m};
    free = MemberId{m};
  }
  return unused ? unused : free;
}

void Roster::attach(ConnectionId from, const wire::Attach& request) {
  store::ControlBlock& control = context_.control();
  if (const auto member = member_of(from))
    return expel(*member, "it attached twice on one connection");
  const auto waiting = std::find_if(queue_.begin(), queue_.end(),
                                    [&](const Queued& queued) { return queued.from == from; });
  if (waiting != queue_.end()) {
    queue_.erase(waiting);
    return refuse(from, StatusCode::kInternal, "a worker attached twice on one connection", true);
  }
  if (request.protocol != wire::kProtocolVersion)
    return refuse(from, StatusCode::kConfig,
                  formatted("this worker speaks protocol {}, the job's server {}; install the same "
                            "psplus version everywhere",
                            request.protocol, wire::kProtocolVersion),
                  true);
  const std::uint32_t world = peek(control.world_size);
  if (world != 0 && world != request.world_size)
    return refuse(from, StatusCode::kConfig,
                  formatted("rank {} says WORLD_SIZE is {}, but this job was started with {}; stop "
                            "the other job or set PSPLUS_JOB to a name of its own",
                            raw(request.rank), request.world_size, world),
                  true);
  if (request.world_size == 0 || raw(request.rank) >= request.world_size)
    return refuse(
        from, StatusCode::kConfig,
        formatted("rank {} is not below WORLD_SIZE {}", raw(request.rank), request.world_size),
        true);
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const store::MemberEntry& entry = context_.member(MemberId{m});
    const MemberState state = member_state(control, MemberId{m});
    if (state == MemberState::kFree || peek(entry.rank) != raw(request.rank)) continue;
    // The same process again: its former attachment was cut off before it heard of it.
    if (unresumed_.contains(MemberId{m}) && peek(entry.process) == request.process)
      expel(MemberId{m}, "it attached anew");
    if (member_state(control, MemberId{m}) == MemberState::kDraining ||
        unresumed_.contains(MemberId{m})) {
      queue_.push_back({from, request});
      return;
    }
    return refuse_taken(from, MemberId{m});
  }
  admit(from, request);
}

void Roster::admit(ConnectionId from, const wire::Attach& request) {
  store::Store& store = context_.store;
  store::ControlBlock& control = context_.control();
  const auto place = place_for(request.rank);
  const std::uint32_t incarnation = peek(control.next_incarnation);
  if (!place || incarnation >= kLastIncarnation)
    return refuse(from, StatusCode::kNoSpace,
                  place
                      ? "this job's server has attached 65,534 workers in its life; restart the job"
                      : formatted("a server takes {} workers at most; set PSPLUS_HOST_ID to split "
                                  "this host's workers over several servers",
                                  store::kMaxMembers),
                  true);
  const MemberId member = *place;
  const Incarnation life{static_cast<std::uint16_t>(incarnation)};
  const auto mailbox = store.create_mailbox(member, life);
  if (!mailbox.ok()) return refuse(from, mailbox.status().code(), mailbox.status().message(), true);
  store::MemberEntry& entry = context_.member(member);
  store.put(control.next_incarnation, incarnation + 1);
  store.put(control.world_size, request.world_size);
  store.put(entry.rank, raw(request.rank));
  store.put(entry.incarnation, incarnation);
  store.put(entry.process, request.process);
  store.put(entry.mailbox_segment, raw(*mailbox));
  store.put(entry.founder, 0);
  store.put(entry.last_sign_of_life, to_nanoseconds(context_.now));
  heartbeats_[index(member)] = 0;
  store.put(entry.state, raw(MemberState::kJoining), std::memory_order_release);
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s)
    store.put(context_.in_stream(StreamId{s}, member).state, raw(StreamMemberState::kAbsent));

  context_.emit(Send{from,
                     wire::Welcome{control.header.job, member, life, Epoch{peek(control.epoch)}},
                     {SegmentId{control.header.id}}});
  for (const auto& [id, segment] : store.segments())
    if (id != control.header.id && id != *mailbox) context_.emit(Send{from, wire::Offer{id}, {id}});
  peers_[from] = {.member = member, .holding = control.header.id, .detaching = false};
  offer(*mailbox);
  when_all_hold(*mailbox, [this, from, member, life] {
    if (member_of(from) != member) return;  // it died meanwhile
    store::MemberEntry& joined = context_.member(member);
    if (peek(joined.incarnation) != raw(life)) return;
    // The commit: from here a successor knows this worker.
    context_.store.put(joined.state, raw(MemberState::kLive), std::memory_order_release);
    context_.emit(Send{from, wire::Attached{}, {}});
  });
}

void Roster::resume(ConnectionId from, const wire::Resume& request) {
  const store::ControlBlock& control = context_.control();
  const bool known = request.protocol == wire::kProtocolVersion &&
                     request.job == control.header.job && unresumed_.contains(request.member) &&
                     !member_of(from) &&
                     peek(context_.member(request.member).incarnation) == raw(request.incarnation);
  if (!known)
    return refuse(
        from, StatusCode::kClosed,
        "this worker was expelled while its server was away: it did not come back in time", true);
  unresumed_.erase(request.member);
  std::erase_if(queue_, [&](const Queued& queued) {
    if (raw(queued.request.rank) != peek(context_.member(request.member).rank)) return false;
    refuse_taken(queued.from, request.member);
    return true;
  });
  peers_[from] = {.member = request.member, .holding = control.header.id, .detaching = false};
  context_.emit(Send{from,
                     wire::Welcome{control.header.job, request.member, request.incarnation,
                                   Epoch{peek(control.epoch)}},
                     {SegmentId{control.header.id}}});
  // All of them, whatever it holds already: which of its predecessors' offers reached a worker
  // differs from one to the other, so no single number tells what this one lacks.
  for (const auto& [id, segment] : context_.store.segments())
    if (id != control.header.id) context_.emit(Send{from, wire::Offer{id}, {id}});
  context_.emit(Send{from, wire::Attached{}, {}});
}

void Roster::offer(SegmentId segment) {
  for (const auto& [connection, peer] : peers_)
    context_.emit(Send{connection, wire::Offer{segment}, {segment}});
}

void Roster::holding(ConnectionId from, SegmentId segment) {
  const auto found = peers_.find(from);
  if (found == peers_.end()) return;
  found->second.holding = std::max(found->second.holding, segment);
  run_waiters();
}

void Roster::when_all_hold(SegmentId segment, std::function<void()> then) {
  waiters_.push_back({segment, std::move(then)});
  run_waiters();
}

void Roster::run_waiters() {
  if (!unresumed_.empty()) return;  // they hold nothing that was made since the take-over
  SegmentId held{~std::uint32_t{0}};
  for (const auto& [connection, peer] : peers_) held = std::min(held, peer.holding);
  while (!waiters_.empty() && waiters_.front().segment <= held) {
    const auto then = std::move(waiters_.front().then);
    waiters_.erase(waiters_.begin());
    then();
  }
}

void Roster::begin_draining(MemberId member) {
  store::Store& store = context_.store;
  if (member_state(context_.control(), member) == MemberState::kJoining) {
    // Nobody counted it yet: it never was.
    store.put(context_.member(member).state, raw(MemberState::kFree));
    for (const SegmentId id : store.drop_member(member))
      for (const auto& [connection, peer] : peers_)
        context_.emit(Send{connection, wire::Drop{id}, {}});
    return;
  }
  // Closed first, then counted out: what is published until here is applied, and nothing after it.
  for (store::MailStream& mail : store.mailbox(member).streams) {
    store.before_write();
    mail.published.fetch_or(store::PushMark::kClosed, std::memory_order_acq_rel);
  }
  store.put(context_.member(member).state, raw(MemberState::kDraining), std::memory_order_release);
}

void Roster::detach(ConnectionId from) {
  const auto found = peers_.find(from);
  if (found == peers_.end()) return;
  const MemberId member = found->second.member;
  const bool joining = member_state(context_.control(), member) == MemberState::kJoining;
  found->second.detaching = true;
  begin_draining(member);
  if (!joining) return;  // answered when its pushes are in
  context_.emit(Send{from, wire::Detached{}, {}});
  context_.emit(Disconnect{from});
  peers_.erase(from);
  run_waiters();
}

void Roster::lost(ConnectionId connection) {
  std::erase_if(queue_, [&](const Queued& queued) { return queued.from == connection; });
  const auto found = peers_.find(connection);
  if (found == peers_.end()) return;
  const MemberId member = found->second.member;
  const bool detaching = found->second.detaching;
  peers_.erase(found);
  if (!detaching) {
    context_.emit(Log{formatted("rank {} (process {}) is gone", peek(context_.member(member).rank),
                                peek(context_.member(member).process))});
    begin_draining(member);
  }
  run_waiters();
}

void Roster::expel(MemberId member, const std::string& reason) {
  const auto connection = connection_of(member);
  context_.emit(
      Log{formatted("rank {} (process {}) is expelled: {}", peek(context_.member(member).rank),
                    peek(context_.member(member).process), reason)});
  unresumed_.erase(member);
  if (connection) {
    refuse(*connection, StatusCode::kClosed,
           formatted("the server expelled this worker: {}", reason), true);
    peers_.erase(*connection);
  }
  if (member_state(context_.control(), member) != MemberState::kFree) begin_draining(member);
  run_waiters();
}

void Roster::look_for_life() {
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId member{m};
    if (!context_.store.has_mailbox(member)) continue;
    const std::uint64_t beat =
        context_.store.mailbox(member).heartbeat.load(std::memory_order_relaxed);
    if (std::exchange(heartbeats_[m], beat) != beat)
      context_.store.put(context_.member(member).last_sign_of_life, to_nanoseconds(context_.now));
  }
}

void Roster::tick() {
  look_for_life();
  std::vector<MemberId> late;
  for (const auto& [member, until] : unresumed_)
    if (context_.now >= until) late.push_back(member);
  for (const MemberId member : late)
    expel(member, "it did not come back after its server was restarted");
}

void Roster::release_drained(const std::function<bool(MemberId)>& drained) {
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId member{m};
    if (member_state(context_.control(), member) != MemberState::kDraining || !drained(member))
      continue;
    context_.store.put(context_.member(member).state, raw(MemberState::kFree),
                       std::memory_order_release);
    const auto own = connection_of(member);
    for (const SegmentId id : context_.store.drop_member(member))
      for (const auto& [connection, peer] : peers_)
        if (connection != own) context_.emit(Send{connection, wire::Drop{id}, {}});
    if (own) {
      context_.emit(Send{*own, wire::Detached{}, {}});
      context_.emit(Disconnect{*own});
      peers_.erase(*own);
      run_waiters();
    }
    // The first one in the queue takes the place; the others learn that it is taken.
    const std::uint32_t rank = peek(context_.member(member).rank);
    for (const Queued& queued : std::exchange(queue_, {})) {
      if (raw(queued.request.rank) == rank)
        attach(queued.from, queued.request);
      else
        queue_.push_back(queued);
    }
  }
}

}  // namespace psplus::server
