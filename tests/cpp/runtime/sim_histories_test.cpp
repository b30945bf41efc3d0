// Seeded histories of server and workers in virtual time, with kills at any store.

#include <cstdint>
#include <set>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "base/format.hpp"
#include "runtime/sim/world.hpp"
#include "runtime/sim_run.hpp"

namespace psplus::sim {
namespace {

using store::PullMode;
using ::testing::Combine;
using ::testing::Values;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kSeeds = 20;  // each store costs many times as much
constexpr bool kSanitized = true;
#else
constexpr std::uint64_t kSeeds = 130;
constexpr bool kSanitized = false;
#endif

// 4 schemes x 2 pulls x 5 numbers of workers x with and without faults x 130 seeds: 10,400.
using Parameters = std::tuple<Scheme, PullMode, std::uint32_t, bool>;

class SimHistoriesTest : public ::testing::TestWithParam<Parameters> {};

TEST_P(SimHistoriesTest, EveryPublishedPushIsAppliedExactlyOnce) {
  const auto [scheme, pull, workers, faults] = GetParam();
  const auto replay = seed_to_replay();
  std::uint64_t pushes = 0;
  std::uint64_t deaths = 0;
  std::uint64_t lost = 0;
  for (std::uint64_t i = 0; i < kSeeds; ++i) {
    // Seeds differ between parameters, so that a history is known by its seed.
    const std::uint64_t base =
        ((static_cast<std::uint64_t>(scheme) * 2 + static_cast<std::uint64_t>(pull)) * 5 +
         workers) *
            2 +
        (faults ? 1 : 0);
    const std::uint64_t seed = base * 1'000'000 + i;
    if (replay && *replay != seed) continue;
    const bool several_streams = i % 4 == 3;
    const Scenario scenario = make_scenario(seed, {.scheme = scheme,
                                                   .pull = pull,
                                                   .workers = workers,
                                                   .faults = faults,
                                                   .several_streams = several_streams});
    const Outcome outcome = run_history(scenario);
    if (outcome.violation) {
      const auto* const info = ::testing::UnitTest::GetInstance()->current_test_info();
      FAIL() << report(scenario, *outcome.violation,
                       formatted("sim_histories_test --gtest_filter={}.{}", info->test_suite_name(),
                                 info->name()));
    }
    pushes += outcome.pushes;
    deaths += outcome.server_deaths + outcome.worker_deaths;
    lost += outcome.lost ? 1 : 0;
  }
  if (replay) return;
  EXPECT_GT(pushes, kSeeds) << "histories in which nothing happens show nothing";
  if (faults) {
    EXPECT_GT(deaths, kSeeds / 4);
    // A job that is lost with its last worker shows little.
    EXPECT_LT(lost, workers == 1 ? kSeeds : kSeeds / 4);
  } else {
    EXPECT_EQ(deaths, 0U);
    EXPECT_EQ(lost, 0U);
  }
}

std::string name_of(const ::testing::TestParamInfo<Parameters>& info) {
  const auto [scheme, pull, workers, faults] = info.param;
  const char* scheme_name = "";
  switch (scheme) {
    case Scheme::kBsp:
      scheme_name = "bsp";
      break;
    case Scheme::kSsp:
      scheme_name = "ssp";
      break;
    case Scheme::kAsp:
      scheme_name = "asp";
      break;
    case Scheme::kPsPlus:
      scheme_name = "psplus";
      break;
  }
  return formatted("{}_{}_{}w{}", scheme_name, pull == PullMode::kBuffered ? "buffered" : "mapped",
                   workers, faults ? "_faults" : "");
}

INSTANTIATE_TEST_SUITE_P(All, SimHistoriesTest,
                         Combine(Values(Scheme::kBsp, Scheme::kSsp, Scheme::kAsp, Scheme::kPsPlus),
                                 Values(PullMode::kMapped, PullMode::kBuffered),
                                 Values(1U, 2U, 3U, 4U, 5U), Values(false, true)),
                         name_of);

/// A life can end at any word that it stores or reads, and while it waits for anything.
TEST(SimWorldTest, WorkersAreKilledWhateverTheyWaitFor) {
  std::set<std::string> missing{"starting", "attaching", "opening",  "setting",
                                "waiting",  "standing",  "flushing", "asking",
                                "closing",  "detaching", "working"};
  const std::uint64_t end = 77'000'000 + (kSanitized ? 100 : 3000);
  for (std::uint64_t seed = 77'000'000; !missing.empty() && seed < end; ++seed) {
    const Scenario scenario = make_scenario(seed, {.scheme = {},
                                                   .pull = {},
                                                   .workers = {},
                                                   .faults = true,
                                                   .several_streams = seed % 4 == 3});
    const Outcome outcome = run_history(scenario);
    ASSERT_FALSE(outcome.violation) << report(
        scenario, *outcome.violation, "sim_histories_test --gtest_filter=*WhateverTheyWaitFor");
    for (const std::string& what : outcome.killed_while) missing.erase(what);
  }
  EXPECT_TRUE(kSanitized || missing.empty()) << "nobody was killed while " << *missing.begin();
}

/// Equal scenarios have equal outcomes: what makes a seed worth printing.
TEST(SimWorldTest, AHistoryReplays) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Scenario scenario = make_scenario(seed, {});
    const Outcome first = run_history(scenario);
    const Outcome second = run_history(scenario);
    EXPECT_EQ(first.stores, second.stores) << seed;
    EXPECT_EQ(first.pushes, second.pushes) << seed;
    EXPECT_EQ(first.duration, second.duration) << seed;
  }
}

}  // namespace
}  // namespace psplus::sim
