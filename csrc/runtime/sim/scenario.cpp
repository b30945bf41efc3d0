#include "runtime/sim/scenario.hpp"

#include <algorithm>
#include <stdexcept>

#include "base/format.hpp"
#include "runtime/sim/random.hpp"

namespace psplus::sim {
namespace {

using std::chrono::microseconds;

/// A few small parameters that cross chunk boundaries, some of them empty or in double precision.
std::vector<store::ParamSpec> make_params(Random& random) {
  std::vector<store::ParamSpec> params;
  const std::uint64_t count = random.between(1, 5);
  for (std::uint64_t i = 0; i < count; ++i) {
    store::ParamSpec param;
    param.name = formatted("p{}", i);
    param.dtype = random.chance(0.2) ? DType::float64 : DType::float32;
    const bool empty = i != 0 && random.chance(0.1);
    param.shape = {empty ? 0 : static_cast<std::int64_t>(random.between(1, 90))};
    params.push_back(param);
  }
  return params;
}

StreamPlan make_stream(Random& random, const ScenarioChoice& choice) {
  StreamPlan plan;
  plan.scheme = choice.scheme.value_or(static_cast<Scheme>(random.below(4)));
  plan.pull = choice.pull.value_or(random.chance(0.5) ? store::PullMode::kBuffered
                                                      : store::PullMode::kMapped);
  if (plan.scheme == Scheme::kSsp || (plan.scheme == Scheme::kPsPlus && random.chance(0.3)))
    plan.bound = random.below(4);
  const std::uint64_t added = random.chance(0.5) ? random.between(1, 3) : 0;
  for (std::uint64_t e = 0; e <= added; ++e) plan.extents.push_back(make_params(random));
  plan.target = random.between(2, 8);
  if (random.chance(0.4)) plan.barrier_every = random.between(1, 4);
  plan.empty = random.chance(0.3) ? 0.2 : 0.0;
  plan.partial = random.chance(0.5) ? 0.5 : 0.0;
  plan.set = random.chance(0.2) ? 0.1 : 0.0;
  plan.cut = random.chance(0.4) ? 0.2 : 0.0;
  plan.grow = random.chance(0.5) ? 0.3 : 0.7;
  plan.closes = random.chance(0.3);
  return plan;
}

/// Half of the kills aim into a batch, some into a recovery, the others at any store.
ServerKill make_server_kill(Random& random, bool in_recovery) {
  if (in_recovery && random.chance(0.5)) return {.batch = 0, .store = random.between(1, 60)};
  if (random.chance(0.3)) return {.batch = 0, .store = random.between(1, 1500)};
  return {.batch = random.between(1, 12), .store = random.between(1, 60)};
}

void add_faults(Random& random, Scenario& scenario) {
  if (random.chance(0.8)) {
    const std::uint64_t lives = random.between(1, 4);
    for (std::uint64_t i = 0; i < lives; ++i)
      scenario.server_kills.push_back(make_server_kill(random, i != 0));
  }
  scenario.worker_kills.resize(scenario.workers);
  for (auto& lives : scenario.worker_kills)
    while (lives.size() < 3 && random.chance(0.35))
      lives.push_back({.point = random.between(1, random.chance(0.5) ? 200 : 2000),
                       .restarts = random.chance(0.7)});
  const auto any_rank = [&] { return static_cast<std::uint32_t>(random.below(scenario.workers)); };
  if (random.chance(0.25))
    scenario.freezes.push_back({.rank = any_rank(),
                                .at = random.duration(milliseconds{1}, milliseconds{25}),
                                .duration = random.duration(milliseconds{1}, milliseconds{90})});
  if (random.chance(0.15))
    scenario.broken_links.push_back(
        {.rank = any_rank(), .at = random.duration(milliseconds{1}, milliseconds{25})});
  if (random.chance(0.1)) scenario.refused_segment = random.between(1, 12);
  while (scenario.timed_kills.size() < 3 && random.chance(0.3))
    scenario.timed_kills.push_back(
        {.rank = any_rank(),
         .at = random.duration(nanoseconds{0}, milliseconds{random.chance(0.5) ? 3 : 25})});
}

}  // namespace

std::string_view to_string(Scheme scheme) {
  switch (scheme) {
    case Scheme::kBsp:
      return "bsp";
    case Scheme::kSsp:
      return "ssp";
    case Scheme::kAsp:
      return "asp";
    case Scheme::kPsPlus:
      return "psplus";
  }
  throw std::invalid_argument("to_string: not a Scheme");
}

Scenario make_scenario(std::uint64_t seed, const ScenarioChoice& choice) {
  Random random{seed};
  Scenario scenario;
  scenario.seed = seed;
  scenario.workers = choice.workers.value_or(static_cast<std::uint32_t>(random.between(1, 5)));
  const std::uint64_t streams = choice.several_streams ? random.between(2, 3) : 1;
  Random rules{seed ^ 0x57e9};
  for (std::uint64_t i = 0; i < streams; ++i) {
    scenario.streams.push_back(make_stream(random, choice));
    if (rules.chance(0.35)) scenario.streams.back().rule = {store::RuleKind::kSgd, 1};
  }
  // With several streams one could stand at a barrier of the first while another waits for its step
  // on the second.
  scenario.streams.front().uneven = streams == 1 && random.chance(0.5);
  scenario.chunk_bytes = random.chance(0.5) ? 256 : 128;
  scenario.config.piece_bytes = random.chance(0.5) ? 64 : 128;
  scenario.budget_bytes = random.between(1, 4) * 64;
  scenario.config.resume_timeout = milliseconds{30};
  if (random.chance(0.3)) scenario.config.max_batch_pushes = random.between(1, 3);
  scenario.readers = static_cast<std::uint32_t>(random.below(3));
  if (random.chance(0.3)) scenario.timing.store = nanoseconds{200};  // a server that keeps up
  if (random.chance(0.2)) scenario.timing.compute = {microseconds{1}, microseconds{100}};
  if (choice.faults) add_faults(random, scenario);
  return scenario;
}

std::string Scenario::describe() const {
  std::string text = formatted("{} worker(s)", workers);
  for (const StreamPlan& stream : streams) {
    text += formatted(", {} {}", to_string(stream.scheme),
                      stream.pull == store::PullMode::kBuffered ? "buffered" : "mapped");
    if (stream.rule.steps()) text += " stepped by the server";
    if (stream.bound != store::kNoBound) text += formatted(" (bound {})", stream.bound);
    if (stream.barrier_every != 0 && stream.uneven) text += " with uneven barriers";
    if (stream.extents.size() > 1) text += formatted(" in {} extents", stream.extents.size());
  }
  for (const ServerKill& kill : server_kills)
    text += kill.batch == 0
                ? formatted(", server killed at store {}", kill.store)
                : formatted(", server killed at store {} of batch {}", kill.store, kill.batch);
  for (std::size_t rank = 0; rank < worker_kills.size(); ++rank)
    for (const WorkerKill& kill : worker_kills[rank])
      text += formatted(", rank {} killed at point {}", rank, kill.point);
  for (const TimedKill& kill : timed_kills)
    text += formatted(", rank {} killed after {} us", kill.rank, kill.at / microseconds{1});
  for (const Freeze& freeze : freezes) text += formatted(", rank {} frozen", freeze.rank);
  for (const BrokenLink& link : broken_links) text += formatted(", rank {} cut off", link.rank);
  if (refused_segment) text += formatted(", request {} for memory refused", *refused_segment);
  return text;
}

}  // namespace psplus::sim
