#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/sim/heap_source.hpp"
#include "runtime/sim/link.hpp"
#include "runtime/sim/random.hpp"
#include "runtime/sim/scenario.hpp"
#include "server/core.hpp"
#include "store/store.hpp"

namespace psplus::sim {

class World;

/// Lives of a server, one after the other. Each of its stores takes time, in which the others act,
/// and may be its last: then the state machine is thrown away with all that it had not stored.
class Server final : public store::WriteHook {
 public:
  Server(World& world, Random random);

  /// Begins a job without a predecessor.
  void start_fresh();
  /// Begins a life over what a worker handed over. The life may end while it does so.
  void start_over(std::vector<store::SegmentHandle> segments);

  /// Whether workers can reach it: not before it has recovered what it took over.
  [[nodiscard]] bool listens() const noexcept { return listens_ && !stopped_; }
  [[nodiscard]] bool stopped() const noexcept { return stopped_; }
  [[nodiscard]] std::uint64_t life() const noexcept { return life_; }
  [[nodiscard]] std::uint64_t stores() const noexcept { return stores_; }
  /// Its segments; while it is alive or after it stopped.
  [[nodiscard]] const store::Store& store() const noexcept { return *store_; }

  void accept(const LinkPtr& link) { links_[link->id] = link; }
  void receive(const LinkPtr& link, ToServerMail mail);
  /// The process behind `link` has ended, or the link broke.
  void lose(const LinkPtr& link);
  /// Somebody has rung the doorbell of life `life`.
  void ring(std::uint64_t life);

  void before_write() override;

 private:
  struct Killed {};

  void begin_life();
  void schedule_turn(nanoseconds delay);
  void turn();
  bool work();
  void handle(const server::Event& event);
  void carry_out_effects();
  void carry_out(const server::Send& send);
  void tick();
  void die();

  World& world_;
  Random random_;
  HeapSource source_;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<server::Core> core_;
  std::map<server::ConnectionId, LinkPtr> links_;
  std::deque<server::Event> inbox_;
  std::uint64_t life_ = 0;
  std::uint64_t stores_ = 0;          ///< in this life
  std::uint64_t batches_opened_ = 0;  ///< in this life
  std::uint64_t last_batch_ = 0;
  std::optional<std::uint64_t> last_store_;  ///< this life ends at that store
  bool listens_ = false;
  bool turn_scheduled_ = false;
  bool stopped_ = false;
};

}  // namespace psplus::sim
