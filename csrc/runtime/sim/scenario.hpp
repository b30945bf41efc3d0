#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "server/context.hpp"
#include "store/control.hpp"
#include "store/layout.hpp"

namespace psplus::sim {

enum class Scheme : std::uint8_t { kBsp, kSsp, kAsp, kPsPlus };
[[nodiscard]] std::string_view to_string(Scheme scheme);

/// What the workers do on one stream.
struct StreamPlan {
  Scheme scheme = Scheme::kPsPlus;
  store::PullMode pull = store::PullMode::kMapped;
  std::uint64_t bound = store::kNoBound;  ///< staleness bound in steps
  /// Without kinds: pushes are updates. With SGD the servers step on gradients: momentum 1, no
  /// dampening, no decay, so that whole numbers stay such.
  store::Rule rule;
  /// Parameters of each extent: the first is there from the start, the others are added later.
  std::vector<std::vector<store::ParamSpec>> extents;
  std::uint64_t target = 6;         ///< a worker has finished when its clock reads this
  std::uint64_t barrier_every = 0;  ///< steps between barriers, 0 for none
  bool uneven = false;              ///< workers of odd rank make one step more between barriers
  // Chances at each step.
  double empty = 0;     ///< the push carries nothing
  double partial = 0;   ///< it carries some of the parameters
  double set = 0;       ///< a push that sets all values goes before it
  double cut = 0;       ///< a cut is asked for after it
  double grow = 0;      ///< the worker's next extent is added before it, if there is one left
  bool closes = false;  ///< closed by itself as soon as the target is reached

  [[nodiscard]] store::Mode mode() const noexcept {
    return scheme == Scheme::kBsp ? store::Mode::kBsp : store::Mode::kAsync;
  }
};

/// When a life of the server ends: at its `store`-th store after it opened its `batch`-th batch
/// (0: after its start).
struct ServerKill {
  std::uint64_t batch = 0;
  std::uint64_t store = 1;
};

/// When a life of a worker ends, counted in the words that it stores and reads and the points where
/// it lets others run; and whether a new process takes its rank afterwards.
struct WorkerKill {
  std::uint64_t point = 1;
  bool restarts = true;
};

/// A worker is killed at a moment, whatever it waits for.
struct TimedKill {
  std::uint32_t rank = 0;
  nanoseconds at{};
};

struct Freeze {
  std::uint32_t rank = 0;
  nanoseconds at{};
  nanoseconds duration{};
};

/// A connection that breaks although both sides live.
struct BrokenLink {
  std::uint32_t rank = 0;
  nanoseconds at{};
};

/// A span of time that something takes.
struct Range {
  nanoseconds least{};
  nanoseconds most{};
};

struct Timing {
  Range start{nanoseconds{0}, milliseconds{2}};                                    ///< of a worker
  Range compute{std::chrono::microseconds{200}, std::chrono::microseconds{1500}};  ///< of a step
  Range message{std::chrono::microseconds{5}, std::chrono::microseconds{300}};
  Range wake{std::chrono::microseconds{1}, std::chrono::microseconds{40}};  ///< futex and doorbell
  Range death{std::chrono::microseconds{20}, milliseconds{2}};  ///< until a death is noticed
  Range restart{milliseconds{1}, milliseconds{8}};  ///< of a worker; of a server a quarter of it
  nanoseconds store = nanoseconds{1500};            ///< longest time of one store of the server
  nanoseconds tick = milliseconds{5};
  nanoseconds limit = std::chrono::seconds{3};  ///< a history that has not ended by then hangs
};

/// Everything that makes one history; equal scenarios give equal histories.
struct Scenario {
  std::uint64_t seed = 0;
  std::uint32_t workers = 2;
  std::vector<StreamPlan> streams;
  std::size_t chunk_bytes = 256;
  std::size_t budget_bytes = 128;
  server::Config config;
  std::uint32_t readers = 0;
  Timing timing;

  std::vector<ServerKill> server_kills;               ///< one a life; later lives are spared
  std::vector<std::vector<WorkerKill>> worker_kills;  ///< by rank, one a life
  std::vector<TimedKill> timed_kills;
  std::vector<Freeze> freezes;
  std::vector<BrokenLink> broken_links;
  bool trace = false;                            ///< keep an account of what happened, for replays
  std::optional<std::uint64_t> refused_segment;  ///< the n-th request for memory fails, once

  [[nodiscard]] std::string describe() const;
};

/// What a generated scenario is to be; the rest follows from the seed.
struct ScenarioChoice {
  std::optional<Scheme> scheme;
  std::optional<store::PullMode> pull;
  std::optional<std::uint32_t> workers;
  bool faults = true;
  bool several_streams = false;
};

[[nodiscard]] Scenario make_scenario(std::uint64_t seed, const ScenarioChoice& choice);

}  // namespace psplus::sim
