#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>

#include "base/format.hpp"
#include "runtime/sim/scenario.hpp"
#include "runtime/sim/world.hpp"

namespace psplus::sim {

/// The seed to replay, from PSPLUS_SIM_SEED; unset: all seeds run.
inline std::optional<std::uint64_t> seed_to_replay() {
  const char* const text = std::getenv("PSPLUS_SIM_SEED");
  if (text == nullptr) return std::nullopt;
  return std::strtoull(text, nullptr, 10);
}

/// Runs one history; a replayed one prints what happens in it.
inline Outcome run_history(Scenario scenario) {
  scenario.trace = seed_to_replay().has_value();
  const Outcome outcome = World{scenario}.run();
  for (const std::string& line : outcome.trace) std::cout << line << '\n';
  return outcome;
}

/// What broke, and how to see it again.
inline std::string report(const Scenario& scenario, const Violation& violation,
                          const std::string& test) {
  return formatted("{}: {}\n  history: {}\n  replay: PSPLUS_SIM_SEED={} {}", violation.rule,
                   violation.text, scenario.describe(), scenario.seed, test);
}

}  // namespace psplus::sim
