#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/core.hpp"
#include "store/store.hpp"
#include "support/heap_segments.hpp"
#include "worker/push_queue.hpp"

namespace psplus::testing {

/// What a killed server "throws": nothing after it happens.
struct Killed {};

/// Ends the server at the `at`-th store from now, counted from 0.
class KillAt final : public store::WriteHook {
 public:
  void before_write() override {
    if (armed_ && count_++ == at_) throw Killed{};
  }
  void arm(std::uint64_t at) { armed_ = true, at_ = at, count_ = 0; }
  void disarm() { armed_ = false; }
  /// Stores since arm().
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }

 private:
  bool armed_ = false;
  std::uint64_t at_ = 0;
  std::uint64_t count_ = 0;
};

/// A worker as its server sees it: a connection, what came over it, and a queue a stream.
struct TestWorker {
  server::ConnectionId connection{};
  std::uint32_t rank = 0;
  MemberId member{};
  Incarnation incarnation{};
  bool answers_offers = true;  ///< sends Holding for each Offer, as a live session does
  bool connected = true;       ///< false once the server dropped the connection
  std::vector<wire::ToWorker> inbox;
  std::map<SegmentId, store::SegmentHandle> held;
  std::map<StreamId, worker::PushQueue> queues;

  /// Messages of kind M, in order of arrival.
  template <class M>
  [[nodiscard]] std::vector<M> got() const {
    std::vector<M> found;
    for (const wire::ToWorker& message : inbox)
      if (const M* const m = std::get_if<M>(&message)) found.push_back(*m);
    return found;
  }
  [[nodiscard]] SegmentId highest() const {
    return held.empty() ? SegmentId{} : held.rbegin()->first;
  }
};

/// Drives a server core over segments on the heap, one event after the other: no threads, no time
/// but what a test sets.
class ServerHarness {
 public:
  /// Makes where a core reads pushes.
  using Pushes = std::function<std::unique_ptr<server::PushSource>(store::Store&)>;

  static std::unique_ptr<server::PushSource> in_slots(store::Store& store) {
    return std::make_unique<server::SlotSource>(store);
  }

  explicit ServerHarness(server::Config config = {}, Pushes pushes = in_slots);

  /// A connection that has sent nothing yet.
  TestWorker& connect();
  /// Connects and sends Attach; `process` is 1000 + rank.
  TestWorker& attach(std::uint32_t rank, std::uint32_t world_size);
  void send(TestWorker& from, wire::ToServer message, std::span<const std::byte> layout = {},
            std::span<const std::byte> blob = {});
  /// Registers stream `id` and makes the worker's queue for it once it is registered.
  void open(TestWorker& from, StreamId id, const store::ExtentLayout& layout,
            wire::OpenStream how = {}, std::span<const std::byte> blob = {});
  void lose(TestWorker& worker);
  void doorbell() { handle(server::Doorbell{}); }
  void tick(nanoseconds later = {});

  /// Delivers effects and lets the server work until it has nothing to do.
  void run(std::size_t budget = ~std::size_t{0});
  /// One event, without any work on the apply log. Effects are delivered.
  void handle(const server::Event& event);
  void deliver();

  /// Replaces the server by a successor over the segments that live workers hold; connections end.
  /// The successor is killed at its store `kill_at`, if it makes so many before it listens.
  Status take_over(std::uint64_t kill_at = ~std::uint64_t{0});
  /// Gives a worker a new connection.
  void reconnect(TestWorker& worker);
  /// Reconnects a worker of the predecessor's and sends its Resume.
  void resume(TestWorker& worker);

  /// Writes `values` into the slot of the worker's next push and publishes it.
  Status push(TestWorker& worker, StreamId stream, std::span<const double> values,
              worker::PushInfo info = {.flags = store::kPushAllParams, .extents = 1});
  /// The slot for the worker's next push on extent `e` of a stream.
  [[nodiscard]] std::span<std::byte> slot(TestWorker& worker, StreamId stream, std::uint32_t e = 0);
  [[nodiscard]] std::span<std::uint64_t> bitmap(TestWorker& worker, StreamId stream,
                                                std::uint32_t e = 0);
  /// By parameter; none where workers step.
  [[nodiscard]] std::span<store::StepOptions> options(TestWorker& worker, StreamId stream,
                                                      std::uint32_t e = 0);
  /// Writes one parameter, given as doubles, in its storage type into bytes of the extent.
  static void write(const store::ExtentLayout& layout, std::size_t param,
                    std::span<const double> values, std::span<std::byte> extent);
  /// Scalars of one parameter of the shard, as doubles.
  [[nodiscard]] std::vector<double> values(ExtentId extent, std::size_t param = 0) {
    return area(extent, param, 0);
  }
  /// The same of plane `number` of its state.
  [[nodiscard]] std::vector<double> plane(ExtentId extent, std::size_t param, std::size_t number) {
    return area(extent, param, 1 + number);
  }
  /// Steps that one parameter has taken, as each chunk that holds some of it counts them.
  [[nodiscard]] std::vector<std::uint64_t> step_counts(ExtentId extent, std::size_t param);
  /// The same out of bytes of an extent, such as a pull buffer.
  static std::vector<double> values_in(const store::ExtentLayout& layout, std::size_t param,
                                       std::span<const std::byte> extent);

  [[nodiscard]] store::ControlBlock& control() const { return store_->control(); }
  [[nodiscard]] store::StreamMember& counters(StreamId stream, const TestWorker& worker) const {
    return control().streams[index(stream)].members[index(worker.member)];
  }
  [[nodiscard]] store::MailStream& mail(const TestWorker& worker, StreamId stream) const {
    return store_->mail(worker.member, stream);
  }
  [[nodiscard]] store::MemberState state(const TestWorker& worker) const;
  [[nodiscard]] store::Store& store() { return *store_; }
  [[nodiscard]] server::Core& core() { return *core_; }

  HeapSource source;
  KillAt kill;
  TimePoint now{std::chrono::seconds{1000}};
  std::vector<std::string> log;
  bool stopped = false;
  std::vector<server::Wake> wakes;
  std::deque<TestWorker> workers;

 private:
  /// A whole unit of the shard.
  [[nodiscard]] std::vector<std::byte> unit(ExtentId extent, ChunkIndex chunk);
  [[nodiscard]] std::vector<double> area(ExtentId extent, std::size_t param, std::size_t number);

  const server::Config config_;
  const Pushes pushes_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<server::Core> core_;
  std::uint64_t connections_ = 0;
};

}  // namespace psplus::testing
