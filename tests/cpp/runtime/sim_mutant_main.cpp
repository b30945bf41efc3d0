// Runs seeded histories until the checker reports a violation. With --violation there must be one
// (linked with a mutant of a production source, this shows that the checker catches such a
// mistake); with --none there must be none (linked with the product itself). A second argument is
// the number of histories.

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string_view>

#include "base/format.hpp"
#include "runtime/sim/world.hpp"
#include "runtime/sim_run.hpp"

namespace {

using psplus::formatted;
using psplus::sim::Outcome;

int run(bool expects_violation, std::uint64_t seeds) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    const auto scenario = psplus::sim::make_scenario(seed, {.scheme = {},
                                                            .pull = {},
                                                            .workers = {},
                                                            .faults = true,
                                                            .several_streams = seed % 4 == 3});
    const Outcome outcome = psplus::sim::run_history(scenario);
    if (!outcome.violation) continue;
    std::cout << formatted("after {} histories: {}\n", seed + 1,
                           psplus::sim::report(scenario, *outcome.violation, "this program"));
    return expects_violation ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  std::cout << formatted("no violation in {} histories\n", seeds);
  return expects_violation ? EXIT_FAILURE : EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr std::uint64_t kSeeds = 3000;
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode != "--violation" && mode != "--none") {
    std::cerr << formatted("usage: {} --violation|--none [HISTORIES]\n", argv[0]);
    return 2;
  }
  try {
    return run(mode == "--violation", argc > 2 ? std::strtoull(argv[2], nullptr, 10) : kSeeds);
  } catch (const std::exception& error) {
    std::cout << formatted("the simulation itself failed: {}\n", error.what());
    return 3;
  }
}
