#pragma once

#include "runtime/sim/actor.hpp"
#include "runtime/sim/random.hpp"
#include "runtime/sim/scenario.hpp"

namespace psplus::sim {

class World;

/// Copies chunks a few words at a time while the server changes them, by the protocol that real
/// readers follow within one call: load the entry, copy, load the entry again.
class Reader final : public Actor {
 public:
  Reader(World& world, Random random);
  void begin();

 protected:
  void finished(std::exception_ptr error) override;

 private:
  [[nodiscard]] Task live();
  struct Place {
    StreamId stream;
    StreamExtent extent;
    std::vector<BatchId> last;  ///< newest batch seen, by chunk
  };
  [[nodiscard]] Task read(Place& place, ChunkIndex chunk);
  [[nodiscard]] nanoseconds moment();

  World& world_;
  Random random_;
  std::vector<Place> places_;
};

}  // namespace psplus::sim
