// Steps that the server takes: gradients in, values, state and counts out.

#include "server/rule_step.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "server/applier.hpp"
#include "server/batcher.hpp"
#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::FoundedJob;
using psplus::testing::kExtent;
using psplus::testing::kStream;
using psplus::testing::mixed_layout;
using psplus::testing::TestWorker;
using store::Rule;
using store::RuleKind;
using store::StepOptions;

/// One scalar with its state, and how torch.optim steps on it, written out.
struct Scalar {
  double value;
  double planes[store::kMaxPlanes];
  std::uint64_t count;

  void step(const StepOptions& o, double gradient, double scale) {
    double g = (o.flags & store::kStepMaximize) != 0 ? -gradient : gradient;
    const double lr = o.lr * scale;
    const bool decoupled = (o.flags & store::kStepDecoupled) != 0;
    const double decay = decoupled ? lr * o.weight_decay * value : 0;
    if (!decoupled) g += o.weight_decay * value;
    switch (RuleKind{static_cast<std::uint8_t>(o.kind)}) {
      case RuleKind::kNone:
        FAIL() << "no step";
      case RuleKind::kSgd:
        if (o.momentum != 0) {
          planes[0] = count == 0 ? g : o.momentum * planes[0] + (1 - o.dampening) * g;
          g = (o.flags & store::kStepNesterov) != 0 ? g + o.momentum * planes[0] : planes[0];
          ++count;
        }
        value -= lr * g;
        return;
      case RuleKind::kAdam: {
        const auto t = static_cast<double>(++count);
        planes[0] = o.beta1 * planes[0] + (1 - o.beta1) * g;
        planes[1] = o.beta2 * planes[1] + (1 - o.beta2) * g * g;
        double second = planes[1];
        if ((o.flags & store::kStepAmsgrad) != 0)
          second = planes[2] = std::fmax(planes[2], planes[1]);
        const double root = std::sqrt(second / (1 - std::pow(o.beta2, t))) + o.eps;
        value -= decay + lr / (1 - std::pow(o.beta1, t)) * planes[0] / root;
        return;
      }
      case RuleKind::kAdagrad: {
        const auto t = static_cast<double>(++count);
        planes[0] += g * g;
        value -= lr / (1 + (t - 1) * o.lr_decay) * g / (std::sqrt(planes[0]) + o.eps);
        return;
      }
    }
  }
};

double first_value(std::size_t p, std::size_t i) {
  return static_cast<double>((p * 31 + i * 7) % 97) / 64 - 0.7;
}
double first_state(std::size_t plane, std::size_t p, std::size_t i) {
  return static_cast<double>((plane * 13 + p * 5 + i) % 41 + 1) / 32;
}
std::uint64_t first_count(std::size_t p) { return p * 2 % 3; }
/// Gradient of push `number` of a rank: distinct and of both signs.
double gradient(std::uint32_t rank, int number, std::size_t p, std::size_t i) {
  const std::size_t mixed = (rank * 389 + static_cast<std::size_t>(number) * 97 + p * 53 + i) % 211;
  return static_cast<double>(mixed) / 100 - 1.03;
}

struct Case {
  const char* name;
  Rule rule;
  StepOptions options;
};

/// A job whose servers step, beside the account of every scalar.
class SteppedJob : public FoundedJob {
 public:
  SteppedJob(const Case& how, store::Mode mode, std::uint32_t world, std::size_t piece)
      : FoundedJob{world, mixed_layout(), {.mode = mode, .rule = how.rule}, {.piece_bytes = piece}},
        case_(how),
        config_{.piece_bytes = piece} {
    expected_.resize(layout.params().size());
    for (std::size_t p = 0; p < expected_.size(); ++p)
      for (std::size_t i = 0; i < layout.places()[p].scalar_count; ++i) {
        Scalar& scalar = expected_[p].emplace_back(Scalar{first_value(p, i), {}, 0});
        if (how.rule.planes == 0) continue;
        for (std::size_t a = 0; a < how.rule.planes; ++a) scalar.planes[a] = first_state(a, p, i);
        scalar.count = first_count(p);
      }
  }

  /// Planes first, values last, as one who provides an extent does.
  void set_all(std::size_t budget) {
    TestWorker& zero = workers[0];
    for (std::uint32_t a = 0; a < case_.rule.planes; ++a) {
      fill(zero, [&](std::size_t p, std::size_t i) { return first_state(a, p, i); });
      const auto all = options(zero, kStream);
      for (std::size_t p = 0; p < all.size(); ++p) all[p].count = first_count(p);
      ASSERT_OK(publish(zero, {.flags = store::set_plane(a), .extents = 1}));
      apply(budget);
    }
    fill(zero, first_value);
    for (StepOptions& one : options(zero, kStream)) one.count = 99;  // counts go with planes
    ASSERT_OK(publish(zero, {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
    apply(budget);
  }

  [[nodiscard]] StepOptions options_of(std::uint32_t rank, std::size_t p) const {
    StepOptions made = case_.options;
    made.lr *= static_cast<double>(1 + p) / (1 + rank);
    return made;
  }

  /// A push of the parameters that `carried` has; what others' options hold is garbage.
  void push_gradient(std::uint32_t rank, int number, const std::set<std::size_t>& carried,
                     double lambda) {
    TestWorker& worker = workers[rank];
    const std::vector<std::size_t> list(carried.begin(), carried.end());
    fill(
        worker, [&](std::size_t p, std::size_t i) { return gradient(rank, number, p, i); }, list);
    const auto all = options(worker, kStream);
    for (std::size_t p = 0; p < all.size(); ++p)
      all[p] = carried.contains(p)
                   ? options_of(rank, p)
                   : StepOptions{.kind = 77, .lr = std::numeric_limits<double>::quiet_NaN()};
    const bool whole = carried.size() == layout.params().size();
    ASSERT_OK(publish(worker, {.flags = whole ? std::uint32_t{store::kPushAllParams} : 0,
                               .extents = 1,
                               .lambda = lambda}));
  }

  /// One batch, formed and applied outside the job's core.
  void apply(std::size_t budget) {
    SlotSource slots{store()};
    Context context{
        .store = store(), .pushes = slots, .config = config_, .now = now, .effects = {}};
    Batcher batcher{context};
    ASSERT_TRUE(batcher.open_next()) << joined_reasons(batcher);
    Applier applier{context};
    applier.begin(ApplyBatch{});
    for (int calls = 0; !applier.advance(budget);) ASSERT_LT(++calls, 100'000);
  }

  void expect_step(std::size_t p, const StepOptions& o, auto gradient_of, double scale) {
    for (std::size_t i = 0; i < expected_[p].size(); ++i)
      expected_[p][i].step(o, gradient_of(i), scale);
  }

  void compare() {
    for (std::size_t p = 0; p < expected_.size(); ++p) {
      SCOPED_TRACE("parameter " + std::to_string(p));
      const bool narrow = layout.places()[p].storage == Storage::float32;
      const double tolerance = narrow ? 2e-6 : 1e-14;
      for (std::size_t a = 0; a <= case_.rule.planes; ++a) {
        const auto found = a == 0 ? values(kExtent, p) : plane(kExtent, p, a - 1);
        ASSERT_EQ(found.size(), expected_[p].size());
        for (std::size_t i = 0; i < found.size(); ++i) {
          const Scalar& scalar = expected_[p][i];
          const double expected = a == 0 ? scalar.value : scalar.planes[a - 1];
          ASSERT_NEAR(found[i], expected, tolerance * (1 + std::fabs(expected)))
              << "area " << a << ", scalar " << i;
        }
      }
      if (case_.rule.planes == 0) continue;
      for (const std::uint64_t count : step_counts(kExtent, p))
        ASSERT_EQ(count, expected_[p].front().count);
    }
  }

 private:
  static std::string joined_reasons(Batcher& batcher) {
    std::string text;
    for (const Batcher::Offence& offence : batcher.take_offences()) text += offence.reason + "; ";
    return text;
  }
  const Case case_;
  const Config config_;
  std::vector<std::vector<Scalar>> expected_;  ///< by parameter
};

constexpr std::uint32_t kSgd = raw(RuleKind::kSgd);
constexpr std::uint32_t kAdam = raw(RuleKind::kAdam);
constexpr std::uint32_t kAdagrad = raw(RuleKind::kAdagrad);

const Case kCases[] = {
    {"Sgd", {RuleKind::kSgd, 0}, {.kind = kSgd, .lr = 0.1, .weight_decay = 0.05}},
    {"SgdMaximize", {RuleKind::kSgd, 0}, {.kind = kSgd, .flags = store::kStepMaximize, .lr = 0.1}},
    {"Momentum", {RuleKind::kSgd, 1}, {.kind = kSgd, .lr = 0.1, .momentum = 0.9}},
    {"MomentumOff", {RuleKind::kSgd, 1}, {.kind = kSgd, .lr = 0.1, .weight_decay = 0.05}},
    {"Dampening",
     {RuleKind::kSgd, 1},
     {.kind = kSgd, .lr = 0.1, .momentum = 0.8, .dampening = 0.3, .weight_decay = 0.01}},
    {"Nesterov",
     {RuleKind::kSgd, 1},
     {.kind = kSgd,
      .flags = store::kStepNesterov | store::kStepMaximize,
      .lr = 0.05,
      .momentum = 0.9}},
    {"Adam",
     {RuleKind::kAdam, 2},
     {.kind = kAdam, .lr = 0.02, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-3}},
    {"AdamW",
     {RuleKind::kAdam, 2},
     {.kind = kAdam,
      .flags = store::kStepDecoupled | store::kStepMaximize,
      .lr = 0.02,
      .weight_decay = 0.1,
      .beta1 = 0.8,
      .beta2 = 0.95,
      .eps = 1e-3}},
    {"Amsgrad",
     {RuleKind::kAdam, 3},
     {.kind = kAdam,
      .flags = store::kStepAmsgrad,
      .lr = 0.02,
      .beta1 = 0.9,
      .beta2 = 0.9,
      .eps = 1e-3}},
    {"Adagrad",
     {RuleKind::kAdagrad, 1},
     {.kind = kAdagrad, .lr = 0.1, .weight_decay = 0.02, .eps = 1e-4, .lr_decay = 0.25}},
};

struct Pace {
  std::size_t budget, piece_bytes;
};
const Pace kPaces[] = {{~std::size_t{0}, 65'536}, {1, 64}, {100, 128}};

class RuleStep : public ::testing::TestWithParam<std::tuple<Case, Pace>> {
 protected:
  [[nodiscard]] SteppedJob job(store::Mode mode, std::uint32_t world) const {
    const auto& [how, pace] = GetParam();
    return SteppedJob{how, mode, world, pace.piece_bytes};
  }
  [[nodiscard]] std::size_t budget() const { return std::get<Pace>(GetParam()).budget; }
  static inline const std::set<std::size_t> kAll{0, 1, 2, 3, 4, 5, 6};
  static inline const std::set<std::size_t> kSome{1, 2, 5};
  static inline const std::set<std::size_t> kOther{0, 1};
};

TEST_P(RuleStep, SetsReplaceValuesStateAndCounts) {
  SteppedJob stepped = job(store::Mode::kAsync, 1);
  stepped.set_all(budget());
  stepped.compare();
}

TEST_P(RuleStep, AsynchronousPushesAreStepsOneAfterTheOther) {
  SteppedJob stepped = job(store::Mode::kAsync, 2);
  stepped.set_all(budget());
  stepped.push_gradient(1, 1, kAll, 1.0);
  stepped.apply(budget());
  for (const std::size_t p : kAll)
    stepped.expect_step(
        p, stepped.options_of(1, p), [&](std::size_t i) { return gradient(1, 1, p, i); }, 0.5);
  stepped.compare();
  // One batch of three, in the order of the members.
  stepped.push_gradient(1, 2, kOther, 1.0);
  stepped.push_gradient(0, 1, kSome, 0.5);
  stepped.push_gradient(0, 2, kOther, 0.25);
  stepped.apply(budget());
  for (const auto& [rank, number, carried, scale] :
       {std::tuple{0u, 1, kSome, 0.25}, {0u, 2, kOther, 0.125}, {1u, 2, kOther, 0.5}})
    for (const std::size_t p : carried)
      stepped.expect_step(
          p, stepped.options_of(rank, p),
          [&](std::size_t i) { return gradient(rank, number, p, i); }, scale);
  stepped.compare();
}

TEST_P(RuleStep, BspTakesOneStepOnTheMeanByTheLowestRanksOptions) {
  SteppedJob stepped = job(store::Mode::kBsp, 3);
  stepped.set_all(budget());
  stepped.push_gradient(2, 1, kAll, 7.0);  // lambda is not of a BSP step
  stepped.push_gradient(1, 1, kSome, 1.0);
  stepped.push_gradient(0, 1, kOther, 1.0);
  stepped.apply(budget());
  for (const std::size_t p : kAll) {
    const std::uint32_t lowest = kOther.contains(p) ? 0 : kSome.contains(p) ? 1 : 2;
    stepped.expect_step(
        p, stepped.options_of(lowest, p),
        [&](std::size_t i) {
          double sum = gradient(2, 1, p, i);
          if (kSome.contains(p)) sum += gradient(1, 1, p, i);
          if (kOther.contains(p)) sum += gradient(0, 1, p, i);
          return sum / 3;
        },
        1.0);
  }
  stepped.compare();
  // What nobody carries is untouched.
  for (const std::uint32_t rank : {0u, 1u, 2u}) stepped.push_gradient(rank, 2, kOther, 1.0);
  stepped.apply(budget());
  for (const std::size_t p : kOther)
    stepped.expect_step(
        p, stepped.options_of(0, p),
        [&](std::size_t i) {
          return (gradient(0, 2, p, i) + gradient(1, 2, p, i) + gradient(2, 2, p, i)) / 3;
        },
        1.0);
  stepped.compare();
}

std::string name_of(const ::testing::TestParamInfo<RuleStep::ParamType>& info) {
  const auto& [how, pace] = info.param;
  return std::string{how.name} + "Piece" + std::to_string(pace.piece_bytes);
}

INSTANTIATE_TEST_SUITE_P(All, RuleStep,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::ValuesIn(kPaces)),
                         name_of);

// A worker may change its slot after the server has looked at it.
TEST(TakeSteps, WhateverBitsOptionsHaveOnlyTheTargetIsTouched) {
  constexpr std::size_t kCount = 19;
  constexpr float kGuard = 12345;
  std::mt19937_64 random{11};
  for (int turn = 0; turn < 2000; ++turn) {
    StepOptions options;
    options.kind = static_cast<std::uint32_t>(random());
    options.flags = static_cast<std::uint32_t>(random());
    for (double* const value :
         {&options.lr, &options.momentum, &options.dampening, &options.weight_decay, &options.beta1,
          &options.beta2, &options.eps, &options.lr_decay})
      *value = std::bit_cast<double>(random());
    for (const Rule rule :
         {Rule{RuleKind::kSgd, 0}, Rule{RuleKind::kSgd, 1}, Rule{RuleKind::kAdam, 2},
          Rule{RuleKind::kAdam, 3}, Rule{RuleKind::kAdagrad, 1}}) {
      alignas(64) float areas[4][32];
      for (auto& area : areas) std::fill(std::begin(area), std::end(area), kGuard);
      const std::vector<float> gradient(kCount, 0.5F);
      const GradientTerm<float> terms[] = {
          {.gradient = gradient.data(), .options = &options, .scale = 0.5}};
      StepTarget<float> target{.values = areas[0], .planes = {}};
      for (std::size_t a = 0; a < rule.planes; ++a) target.planes[a] = areas[1 + a];
      take_steps<float>(turn % 2 == 0 ? store::BatchKind::kAdd : store::BatchKind::kMean, rule,
                        terms, 1.0, random() % 3, target, kCount);
      for (std::size_t a = 0; a < 4; ++a)
        for (std::size_t i = a <= rule.planes ? kCount : 0; i < 32; ++i)
          ASSERT_EQ(areas[a][i], kGuard) << "area " << a << ", scalar " << i;
    }
  }
}

TEST(CountAfter, OnlyStepsOnStateCountAndBspCountsOne) {
  const StepOptions with{.kind = kSgd, .momentum = 0.5};
  const StepOptions without{.kind = kSgd};
  const StepOptions* const list[] = {&with, &without, &with};
  const Rule momentum{RuleKind::kSgd, 1};
  EXPECT_EQ(count_after(store::BatchKind::kAdd, momentum, list, 5), 7u);
  EXPECT_EQ(count_after(store::BatchKind::kMean, momentum, list, 5), 6u);
  EXPECT_EQ(count_after(store::BatchKind::kMean, momentum, std::span{list}.subspan(1), 5), 5u);
  EXPECT_EQ(count_after(store::BatchKind::kAdd, momentum, {}, 5), 5u);
  EXPECT_EQ(count_after(store::BatchKind::kAdd, Rule{RuleKind::kSgd, 0}, list, 5), 5u);
  EXPECT_EQ(count_after(store::BatchKind::kAdd, Rule{RuleKind::kAdam, 2}, list, 5), 8u);
}

}  // namespace
}  // namespace psplus::server
