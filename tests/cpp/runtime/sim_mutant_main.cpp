// Runs seeded histories until the checker reports a violation. With --violation=RULE[,RULE] there
// must be one, of one of these rules (linked with a mutant of a production source, this shows that
// the checker catches such a mistake by what it broke); with --none there must be none (linked with
// the product itself). A second argument is the number of histories.

#include <algorithm>
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

constexpr std::string_view kViolation = "--violation=";

/// Whether `list`, divided by commas, has `rule`.
bool lists(std::string_view list, std::string_view rule) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == rule) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

/// `rules`: those that must be broken; empty when there must be no violation.
int run(std::string_view rules, std::uint64_t seeds) {
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
    return lists(rules, outcome.violation->rule) ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  std::cout << formatted("no violation in {} histories\n", seeds);
  return rules.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr std::uint64_t kSeeds = 3000;
  const std::string_view mode = argc > 1 ? argv[1] : "";
  const bool mutant = mode.starts_with(kViolation) && mode.size() > kViolation.size();
  if (!mutant && mode != "--none") {
    std::cerr << formatted("usage: {} --violation=RULE[,RULE]|--none [HISTORIES]\n", argv[0]);
    return 2;
  }
  try {
    return run(mutant ? mode.substr(kViolation.size()) : std::string_view{},
               argc > 2 ? std::strtoull(argv[2], nullptr, 10) : kSeeds);
  } catch (const std::exception& error) {
    std::cout << formatted("the simulation itself failed: {}\n", error.what());
    return 3;
  }
}
