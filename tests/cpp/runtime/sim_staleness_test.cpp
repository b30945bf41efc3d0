// Mean actual staleness of equal workers: N - 1 for ASP and mapped PS+, 2(N - 1) for buffered PS+.

#include <cstdint>
#include <tuple>

#include <gtest/gtest.h>

#include "runtime/sim/world.hpp"
#include "runtime/sim_run.hpp"

namespace psplus::sim {
namespace {

using std::chrono::microseconds;
using store::PullMode;
using ::testing::Combine;
using ::testing::Values;

class SimStalenessTest
    : public ::testing::TestWithParam<std::tuple<Scheme, PullMode, std::uint32_t>> {};

TEST_P(SimStalenessTest, EqualWorkersSeeWhatTheTheorySays) {
  const auto [scheme, pull, workers] = GetParam();
  Scenario scenario;
  scenario.seed = 7 + workers;
  scenario.workers = workers;
  StreamPlan plan;
  plan.scheme = scheme;
  plan.pull = pull;
  plan.target = 150;
  plan.extents = {{{"w", DType::float32, {48}}}};
  scenario.streams = {plan};
  scenario.chunk_bytes = 64;
  scenario.budget_bytes = 64;
  scenario.config.piece_bytes = 64;
  scenario.config.max_batch_pushes = 1;  // batching lets pushes of one moment pass for fresh ones
  // Computation of 100 ms +- 10 %, an exchange far below it.
  scenario.timing.compute = {milliseconds{90}, milliseconds{110}};
  scenario.timing.start = {nanoseconds{0}, milliseconds{100}};
  scenario.timing.wake = {microseconds{20}, microseconds{40}};
  scenario.timing.store = nanoseconds{1000};
  scenario.timing.limit = std::chrono::seconds{60};
  const Outcome outcome = run_history(scenario);
  ASSERT_FALSE(outcome.violation) << report(scenario, *outcome.violation, "sim_staleness_test");
  const double rounds = scheme == Scheme::kPsPlus && pull == PullMode::kBuffered ? 2.0 : 1.0;
  const double expected = rounds * (workers - 1);
  ASSERT_EQ(outcome.mean_staleness.size(), 1U);
  EXPECT_NEAR(outcome.mean_staleness[0], expected, 0.1 * expected);
}

INSTANTIATE_TEST_SUITE_P(All, SimStalenessTest,
                         Combine(Values(Scheme::kAsp, Scheme::kPsPlus),
                                 Values(PullMode::kMapped, PullMode::kBuffered),
                                 Values(2U, 4U, 5U)));

}  // namespace
}  // namespace psplus::sim
