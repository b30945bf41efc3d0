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
  [[nodiscard]] Task read(StreamId stream, ChunkIndex chunk);
  [[nodiscard]] nanoseconds moment();

  World& world_;
  Random random_;
  std::vector<std::vector<BatchId>> last_;  ///< newest batch seen, by stream and chunk
};

}  // namespace psplus::sim
