#pragma once

#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "server/applier.hpp"
#include "server/apply_log.hpp"
#include "server/batcher.hpp"
#include "server/context.hpp"
#include "server/events.hpp"
#include "server/push_source.hpp"
#include "server/registry.hpp"
#include "server/roster.hpp"

namespace psplus::server {

/// A server without its surroundings: events in, effects out, shards changed a bounded piece at a
/// time. No I/O, no threads, no clock of its own; everything that outlives it is in the store, so a
/// new core over the same segments goes on where this one was cut off.
///
/// Thread safety: none; one thread drives it.
class Core {
 public:
  /// Pushes are read where `pushes` says: the slots of this host's workers by default.
  Core(store::Store& store, Config config, std::unique_ptr<PushSource> pushes);
  Core(store::Store& store, Config config)
      : Core(store, config, std::make_unique<SlotSource>(store)) {}
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  /// Begins a life over adopted segments: finishes the open batch before anything else, then stores
  /// again what follows from the counters.
  void recover(TimePoint now);

  void handle(const Event& event, TimePoint now);
  /// Works on the apply log. @return whether there is more to do at once.
  bool step(std::size_t budget, TimePoint now);
  /// Takes the effects of everything since the last call, in order.
  [[nodiscard]] std::vector<Effect> take_effects();
  [[nodiscard]] bool busy() const noexcept { return running_ || !log_.empty(); }

 private:
  void received(const Received& event);
  void after_change();
  void expel_offenders();
  void open_gates();
  void queue_requested_cuts();
  void queue_cut(const TakeCut& cut);
  [[nodiscard]] bool drained(StreamId stream, MemberId member) const;
  [[nodiscard]] bool drained(MemberId member) const;

  std::unique_ptr<PushSource> pushes_;
  Context context_;
  Roster roster_;
  Registry registry_;
  Batcher batcher_;
  Applier applier_;
  ApplyLog log_;
  bool running_ = false;  ///< the log's first operation has begun
  bool had_workers_ = false;
  bool stopped_ = false;
};

}  // namespace psplus::server
