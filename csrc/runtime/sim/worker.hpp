#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "runtime/sim/actor.hpp"
#include "runtime/sim/checker.hpp"
#include "runtime/sim/link.hpp"
#include "runtime/sim/random.hpp"
#include "runtime/sim/scenario.hpp"
#include "store/mailbox.hpp"
#include "store/shard.hpp"
#include "worker/push_queue.hpp"

namespace psplus::sim {

class World;

/// One life of a worker process: it attaches, opens its streams, steps under their schemes, and
/// leaves; unless it is killed or expelled before. Its main thread is the coroutine; what a session
/// thread does (descriptors, coming back to a new server) happens when a message arrives.
class Worker final : public Actor {
 public:
  /// `dies_at` counts stored and read words and pauses; 0: it is not killed so.
  Worker(World& world, Random random, Rank rank, std::uint32_t process, std::uint64_t dies_at);

  void begin(nanoseconds delay);
  /// Ends this life where it stands, as SIGKILL does. Not to be called by its own coroutine.
  void kill();
  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  [[nodiscard]] MemberId member() const noexcept { return member_; }
  /// Whether it holds all that a successor of its server needs.
  [[nodiscard]] bool attached() const noexcept { return running() && attached_; }
  /// Whether the server keeps it supplied with segments: not if it was expelled while it was
  /// frozen, which it does not know. Only those who are can promise a successor everything.
  [[nodiscard]] bool may_hand_over() const noexcept;
  /// Whether it has neither begun to leave nor been expelled.
  [[nodiscard]] bool may_still_publish() const noexcept;
  [[nodiscard]] const LinkPtr& link() const noexcept { return link_; }
  [[nodiscard]] std::vector<store::SegmentHandle> held_segments() const;
  [[nodiscard]] const std::string& doing() const noexcept { return doing_; }

  // Called by the network.
  void deliver(const LinkPtr& link, ToWorkerMail mail);
  void link_lost(const LinkPtr& link);
  /// A server listens: connect, and come back or start anew.
  void server_is_up();
  void wake() { notify(); }

 protected:
  void finished(std::exception_ptr error) override;

 private:
  /// Ends this life at once, as SIGKILL does.
  struct Killed {};
  /// The session has failed: the program ends with an error.
  struct Failed {};

  /// An extent of a stream.
  struct Part {
    ExtentId id{};
    store::SlotsView slots;
    store::ShardView shard;
    store::PullView pull;
  };
  struct Stream {
    StreamId id{};
    const StreamPlan* plan = nullptr;
    std::vector<Part> parts;  ///< by StreamExtent: what it has added so far
    store::MailStream* mail = nullptr;
    worker::PushQueue queue;
    std::uint64_t first_clock = 0;
    std::uint64_t steps = 0;              ///< published in this life
    std::vector<Sequence> step_sequence;  ///< of each of them
    std::uint64_t barriers = 0;
    std::uint64_t cut_requests = 0;
    std::uint64_t snapshot_foreign = 0;
    std::uint64_t acknowledged = 0;         ///< sequences that were looked at after `applied`
    std::uint64_t provides = 0;             ///< bit e: its values are to be the first of extent e
    std::uint64_t ready = 0;                ///< bit e: its request for extent e has been answered
    std::optional<std::uint64_t> grown_at;  ///< `steps` when its last snapshot came with an extent
    bool has_left = false;
    bool at_target = false;

    [[nodiscard]] std::uint64_t clock() const noexcept { return first_clock + steps; }
  };

  // The program.
  [[nodiscard]] Task live();
  [[nodiscard]] Task attach();
  [[nodiscard]] Task open(Stream& stream);
  [[nodiscard]] Task grow(Stream& stream);
  /// Registers the next extent; it is the last of the parts then.
  [[nodiscard]] Task add_part(Stream& stream);
  [[nodiscard]] Task provide_or_wait(Stream& stream);
  [[nodiscard]] Task step(Stream& stream);
  [[nodiscard]] Task push(Stream& stream, PushFacts facts);
  [[nodiscard]] Task write_slots(Stream& stream, const PushFacts& facts);
  [[nodiscard]] Task write_slot(Stream& stream, StreamExtent extent, const PushValues& values);
  [[nodiscard]] Task await_reply(Stream& stream, std::uint64_t steps_done);
  [[nodiscard]] Task read_shard(Stream& stream, BatchId at_least);
  [[nodiscard]] Task take_cut(Stream& stream);
  [[nodiscard]] Task flush(Stream& stream);
  [[nodiscard]] Task set_values(Stream& stream);
  [[nodiscard]] Task barrier(Stream& stream);
  [[nodiscard]] Task close(Stream& stream);
  [[nodiscard]] Task detach();
  /// Sends `request` and waits for its answer; sends it again to a new server.
  [[nodiscard]] Task ask(wire::ToServer request, std::vector<std::byte> layout = {});

  [[nodiscard]] Stream* next_stream();
  [[nodiscard]] PushFacts make_step(Stream& stream);
  /// A set of all extents, or the first one of the last extent.
  [[nodiscard]] PushFacts make_set(Stream& stream, bool initial);
  /// The same for the servers' state.
  [[nodiscard]] PushFacts make_state_set(Stream& stream, bool initial);
  void fill(PushValues& values, const ExpectedShard& shard);
  void look_at_acknowledgements(Stream& stream);
  void read_buffer(Stream& stream, std::size_t buffer, BatchId at_least);
  [[nodiscard]] BatchId batch_of_step(const Stream& stream, std::uint64_t steps) const;
  void die_in_descriptor(Stream& stream, std::uint64_t words);
  /// Waits for `ready()`; ends the program when the session fails meanwhile.
  template <class Ready>
  [[nodiscard]] Task wait_for(std::string what, Ready ready);
  [[nodiscard]] Task pause(Range range);
  /// `count` more words are about to be stored: how many of them this life still has.
  [[nodiscard]] std::uint64_t words_left(std::uint64_t count) const noexcept;
  void spend(std::uint64_t points);
  void ring();

  // The session.
  void connect();
  void send(const wire::ToServer& message, std::vector<std::byte> layout = {});
  void hold(SegmentId id, store::SegmentHandle segment);
  void take(const wire::ToWorker& message, std::vector<store::SegmentHandle> segments);
  [[nodiscard]] std::span<std::byte> own_segment(store::SegmentKind kind, ExtentId extent) const;
  [[nodiscard]] LifeId life() const noexcept { return {member_, incarnation_}; }
  void leave_checker();
  [[nodiscard]] bool counted_out() const noexcept;

  World& world_;
  Random random_;
  const Rank rank_;
  const std::uint32_t process_;
  const std::uint64_t dies_at_;
  std::uint64_t points_ = 0;

  LinkPtr link_;
  std::map<SegmentId, store::SegmentHandle> held_;
  std::set<SegmentId> offered_;  ///< since the last Welcome
  bool attached_ = false;        ///< attached at least once
  bool connected_ = false;       ///< attached to the server that is there now
  bool session_failed_ = false;
  bool detaching_ = false;
  std::uint64_t attachments_ = 0;
  std::uint64_t job_ = 0;
  MemberId member_{};
  Incarnation incarnation_{};
  Epoch epoch_{};
  std::uint32_t layout_version_ = 0;
  const store::ControlBlock* control_ = nullptr;
  store::MailboxBlock* mailbox_ = nullptr;
  std::optional<wire::ToWorker> answer_;
  std::deque<Stream> streams_;
  std::string doing_ = "starting";
};

template <class Ready>
Task Worker::wait_for(std::string what, Ready ready) {
  doing_ = std::move(what);
  while (!ready()) {
    if (session_failed_) throw Failed{};
    co_await parked();
  }
  doing_ = "working";
}

}  // namespace psplus::sim
