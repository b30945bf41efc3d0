#include "server/core.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "base/overloaded.hpp"
#include "server/gate.hpp"

namespace psplus::server {

Core::Core(store::Store& store, Config config, std::unique_ptr<PushSource> pushes)
    : pushes_(std::move(pushes)),
      context_{.store = store, .pushes = *pushes_, .config = config, .now = {}, .effects = {}},
      roster_(context_),
      registry_(context_, roster_),
      batcher_(context_),
      applier_(context_) {
  if (config.piece_bytes == 0 || config.piece_bytes % 64 != 0)
    throw std::invalid_argument("Config::piece_bytes must be a positive multiple of 64");
  if (config.max_batch_pushes == 0 || config.max_batch_pushes > store::kMaxBatchPushes)
    throw std::invalid_argument("Config::max_batch_pushes must be 1 to kMaxBatchPushes");
}

std::vector<Effect> Core::take_effects() { return std::exchange(context_.effects, {}); }

void Core::recover(TimePoint now) {
  context_.now = now;
  store::ControlBlock& control = context_.control();
  context_.store.put(control.epoch, peek(control.epoch) + 1);
  if (store::RecordState::unpack(control.record.state.load(std::memory_order_acquire)).open) {
    applier_.begin(ApplyBatch{});
    while (!applier_.advance(~std::size_t{0})) {
    }
  }
  applier_.announce_all();
  roster_.recover();
  had_workers_ = roster_.anybody() || roster_.anybody_draining();
  after_change();
}

void Core::handle(const Event& event, TimePoint now) {
  context_.now = now;
  std::visit(Overloaded{
                 [&](const Received& received_event) { received(received_event); },
                 [&](const Lost& lost) { roster_.lost(lost.connection); },
                 [&](const Doorbell&) {},
                 [&](const Tick&) { roster_.tick(); },
             },
             event);
  after_change();
}

void Core::received(const Received& event) {
  had_workers_ = true;
  const ConnectionId from = event.from;
  std::visit(
      Overloaded{
          [&](const wire::Attach& m) { roster_.attach(from, m); },
          [&](const wire::Resume& m) {
            roster_.resume(from, m);
            registry_.remind(from);
          },
          [&](const wire::OpenStream& m) { registry_.open(from, m, event.layout, event.blob); },
          [&](const wire::Holding& m) { roster_.holding(from, m.segment); },
          [&](const wire::NeedPull& m) { registry_.need_pull(from, m.stream); },
          [&](const wire::CloseStream& m) { registry_.close(from, m.stream); },
          [&](const wire::Detach&) { roster_.detach(from); },
      },
      event.message);
}

bool Core::step(std::size_t budget, TimePoint now) {
  context_.now = now;
  if (!running_) {
    if (log_.empty() && batcher_.open_next()) log_.append(ApplyBatch{});
    if (log_.empty()) {
      expel_offenders();
      return busy();  // without them a gate may have opened, and its cut waits
    }
    applier_.begin(log_.front());
    running_ = true;
  }
  if (applier_.advance(budget)) {
    running_ = false;
    log_.pop();
    expel_offenders();
    after_change();
  }
  return true;
}

/// Between two operations, as the running one may hold a valid push of an offender.
void Core::expel_offenders() {
  const std::vector<Batcher::Offence> offences = batcher_.take_offences();
  if (offences.empty()) return;
  std::set<MemberId> expelled;
  for (const Batcher::Offence& offence : offences) {
    if (!expelled.insert(offence.member).second) continue;
    // What it published beyond recognition counts as done, so that its place can be freed.
    roster_.expel(offence.member, offence.reason);
    for (std::uint16_t s = 0; s < store::kMaxStreams; ++s) {
      const StreamId stream{s};
      if (batcher_.pending(stream, offence.member) == 0) continue;
      const auto published =
          context_.store.mail(offence.member, stream).published.load(std::memory_order_acquire);
      context_.store.put(context_.in_stream(stream, offence.member).dedup,
                         published & ~store::PushMark::kClosed);
    }
  }
  after_change();
}

bool Core::drained(StreamId stream, MemberId member) const {
  if (peek(context_.stream(stream).open) == 0) return true;
  return batcher_.pending(stream, member) == 0;
}

bool Core::drained(MemberId member) const {
  if (running_) {
    // The running batch may still read its slots although its counters are stored already.
    return false;
  }
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s)
    if (!drained(StreamId{s}, member)) return false;
  return true;
}

void Core::after_change() {
  registry_.advance_barriers();  // first: gates do not wait for who stands there
  open_gates();
  queue_requested_cuts();
  registry_.answer_closes([this](StreamId s, MemberId m) { return !running_ && drained(s, m); });
  roster_.release_drained([this](MemberId m) { return drained(m); });
  registry_.settle_providers();
  registry_.give_up_on_refused();
  if (had_workers_ && !roster_.anybody() && !roster_.anybody_draining() && !busy() && !stopped_) {
    stopped_ = true;
    context_.emit(Stop{});
  }
}

/// Releases replies up to the step that the gate allows. With a buffered pull the reply is a cut,
/// so the word is stored when the cut has been taken.
void Core::open_gates() {
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s) {
    const StreamId stream{s};
    if (peek(context_.stream(stream).open) == 0) break;
    const bool buffered = static_cast<store::PullMode>(peek(context_.stream(stream).pull)) ==
                          store::PullMode::kBuffered;
    for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
      const MemberId member{m};
      if (!context_.store.has_mailbox(member) ||
          stream_state(context_.stream(stream), member) != store::StreamMemberState::kRegistered)
        continue;
      store::MailStream& mail = context_.store.mail(member, stream);
      const Step open = released_step(context_.control(), stream, member);
      if (raw(open) <= peek(mail.released)) continue;
      if (!buffered) {
        context_.store.put(mail.released, raw(open), std::memory_order_release);
        context_.emit(Wake{member, stream});
        continue;
      }
      const std::uint64_t step = peek(mail.released) + 1;
      queue_cut({.stream = stream,
                 .member = member,
                 .incarnation = context_.incarnation_of(member),
                 .buffer = static_cast<std::uint32_t>(step % 2),
                 .releases = Step{step},
                 .request = 0});
    }
  }
}

/// Appends a cut unless it waits in the log already.
void Core::queue_cut(const TakeCut& cut) {
  const auto& pending = log_.pending();
  const bool queued = std::any_of(pending.begin(), pending.end(), [&](const Operation& operation) {
    const auto* const other = std::get_if<TakeCut>(&operation);
    return other != nullptr && *other == cut;
  });
  if (!queued) log_.append(cut);
}

void Core::queue_requested_cuts() {
  for (std::uint16_t s = 0; s < store::kMaxStreams; ++s) {
    const StreamId stream{s};
    if (peek(context_.stream(stream).open) == 0) break;
    for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
      const MemberId member{m};
      if (!context_.store.has_mailbox(member)) continue;
      store::MailStream& mail = context_.store.mail(member, stream);
      const std::uint64_t request = mail.cut_requested.load(std::memory_order_acquire);
      if (request == peek(mail.cut_done)) continue;
      queue_cut({.stream = stream,
                 .member = member,
                 .incarnation = context_.incarnation_of(member),
                 .buffer = static_cast<std::uint32_t>(request & 1),
                 .releases = std::nullopt,
                 .request = request});
    }
  }
}

}  // namespace psplus::server
