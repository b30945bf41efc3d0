// Runs seeded histories until the checker reports a violation: exit 0 and its name when one is
// found, 1 when none is. Linked with a mutant of one production source, it shows that the checker
// would catch that mistake; linked with the product itself, its answer must be 1.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>

#include "runtime/sim/world.hpp"
#include "runtime/sim_run.hpp"

int main(int argc, char** argv) {
  using psplus::sim::Outcome;
  const std::uint64_t seeds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 3000;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    const auto scenario = psplus::sim::make_scenario(
        seed, {.scheme = {}, .pull = {}, .workers = {}, .faults = true, .several_streams = false});
    const Outcome outcome = psplus::sim::run_history(scenario);
    if (!outcome.violation) continue;
    fmt::print("seed {}: {}\n", seed, psplus::sim::report(scenario, *outcome.violation, argv[0]));
    return 0;
  }
  fmt::print("no violation in {} histories\n", seeds);
  return 1;
}
