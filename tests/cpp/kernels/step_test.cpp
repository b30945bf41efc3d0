#include "kernels/step.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "guarded_buffer.hpp"
#include "kernel_cases.hpp"
#include "kernels/kernels.hpp"

namespace psplus::kernels {
namespace {

using testing::GuardedBuffer;
using testing::same_result;

/// None, one, and the neighbours of one vector of 2 to 16 lanes and of several; a page and more.
constexpr std::size_t kSizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1040};
constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::bfloat16};

struct Case {
  const char* name;
  StepRule rule;
};

/// Every branch of the arithmetic.
std::vector<Case> rules() {
  return {
      {"sgd", make_rule(SgdOptions{.lr = 0.1}, false)},
      {"sgd_maximize_decay",
       make_rule(SgdOptions{.lr = 0.1, .weight_decay = 0.3, .maximize = true}, false)},
      {"momentum", make_rule(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.25}, false)},
      {"momentum_first",
       make_rule(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.25}, true)},
      {"nesterov", make_rule(SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}, false)},
      {"adam", make_rule(AdamOptions{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}, 3)},
      {"amsgrad_decay", make_rule(AdamOptions{.lr = 0.1,
                                              .beta1 = 0.8,
                                              .beta2 = 0.99,
                                              .eps = 1e-3,
                                              .weight_decay = 0.2,
                                              .amsgrad = true,
                                              .maximize = true},
                                  1)},
      {"adamw", make_rule(AdamOptions{.lr = 0.1,
                                      .beta1 = 0.9,
                                      .beta2 = 0.999,
                                      .eps = 1e-8,
                                      .weight_decay = 0.2,
                                      .decoupled = true},
                          7)},
      {"adagrad",
       make_rule(AdagradOptions{.lr = 0.1, .lr_decay = 0.5, .eps = 1e-10, .weight_decay = 0.1}, 4)},
  };
}

/// What a step writes, with the values before it.
template <class S, class E>
struct Memory {
  Memory(std::size_t n, std::size_t offset, std::uint32_t seed)
      : gradient(n, offset), parameter(n, offset), w(n, 0), update(n, 0) {
    fill(gradient.span(), seed);
    fill(parameter.span(), seed + 1);
    for (std::size_t s = 0; s < kMaxStates; ++s) {
      states.emplace_back(n, offset);
      fill(states.back().span(), seed + 2 + static_cast<std::uint32_t>(s));
      // Second moments are not negative.
      for (E& value : states.back().span()) value = magnitude(value);
    }
    testing::fill_floats<S>(w.span(), seed + 9, false);
  }

  static E magnitude(E value) {
    if constexpr (std::is_same_v<E, std::uint16_t>) {
      return static_cast<E>(value & 0x7fff);
    } else {
      return std::fabs(value);
    }
  }

  static void fill(std::span<E> out, std::uint32_t seed) {
    if constexpr (std::is_same_v<E, std::uint16_t>) {
      std::vector<float> wide(out.size());
      testing::fill_floats<float>(wide, seed, false);
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = static_cast<E>(std::bit_cast<std::uint32_t>(wide[i]) >> 16);
    } else {
      testing::fill_floats<E>(out, seed, false);
    }
  }

  StepRun<S> run(bool pulls, bool streams) {
    return {.gradient = gradient.data(),
            .states = {states[0].data(), states[1].data(), states[2].data()},
            .parameter = parameter.data(),
            .update = update.data(),
            .w = pulls ? w.data() : nullptr,
            .local_scale = S(0.75),
            .streams = streams};
  }

  GuardedBuffer<E> gradient;
  GuardedBuffer<E> parameter;
  std::vector<GuardedBuffer<E>> states;
  GuardedBuffer<S> w;
  GuardedBuffer<S> update;
};

template <class Body>
void with_types(DType dtype, Body body) {
  if (dtype == DType::float64) {
    body(double{}, double{});
  } else if (dtype == DType::float32) {
    body(float{}, float{});
  } else {
    body(float{}, std::uint16_t{});
  }
}

template <class T>
void expect_same(std::span<T> found, std::span<T> expected, const char* what) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if constexpr (std::is_floating_point_v<T>) {
      ASSERT_PRED2(same_result<T>, found[i], expected[i]) << what << ", element " << i;
    } else {
      ASSERT_EQ(found[i], expected[i]) << what << ", element " << i;
    }
  }
}

class StepTest : public ::testing::TestWithParam<std::tuple<DType, bool, bool>> {};

TEST_P(StepTest, EveryInstructionSetGivesTheBitsOfTheReference) {
  const auto [dtype, pulls, streams] = GetParam();
  for (const Case& one : rules()) {
    for (const std::size_t n : kSizes) {
      for (const std::size_t offset : testing::kOffsets) {
        with_types(
            dtype, [&, dtype = dtype, pulls = pulls, streams = streams]<class S, class E>(S, E) {
              Memory<S, E> expected(n, offset, 17);
              table(Isa::scalar).of<S>().step(dtype, one.rule, expected.run(pulls, streams), n);
              for (const Isa isa : testing::supported_isas()) {
                SCOPED_TRACE(std::string{one.name} + ", " + std::string{name(isa)} + ", " +
                             std::to_string(n) + " scalars, offset " + std::to_string(offset));
                Memory<S, E> found(n, offset, 17);
                table(isa).of<S>().step(dtype, one.rule, found.run(pulls, streams), n);
                expect_same(found.update.span(), expected.update.span(), "update");
                expect_same(found.parameter.span(), expected.parameter.span(), "parameter");
                for (std::size_t s = 0; s < kMaxStates; ++s)
                  expect_same(found.states[s].span(), expected.states[s].span(), "state");
                EXPECT_TRUE(found.update.guards_intact() && found.parameter.guards_intact() &&
                            found.states[0].guards_intact() && found.states[1].guards_intact() &&
                            found.states[2].guards_intact());
              }
            });
        if (HasFatalFailure()) return;
      }
    }
  }
}

std::string param_name(const ::testing::TestParamInfo<StepTest::ParamType>& info) {
  const auto [dtype, pulls, streams] = info.param;
  return std::string{name(dtype)} + (pulls ? "_pull" : "_push") + (streams ? "_streams" : "");
}

INSTANTIATE_TEST_SUITE_P(All, StepTest,
                         ::testing::Combine(::testing::ValuesIn(kDTypes), ::testing::Bool(),
                                            ::testing::Bool()),
                         param_name);

// One element each, by the formulas of the papers.

TEST(StepFormulas, Sgd) {
  // b = 0.9 * 2 + 0.75 * (-(3) + 0.3 * 5), Nesterov looks ahead by momentum * b.
  const SgdOptions options{.lr = 0.5,
                           .momentum = 0.9,
                           .dampening = 0.25,
                           .weight_decay = 0.3,
                           .nesterov = false,
                           .maximize = true};
  double g = 3, x = 5, b = 2, update = 0;
  const double direction = -3 + 0.3 * 5;
  StepRun<double> run{.gradient = &g, .states = {&b}, .parameter = &x, .update = &update};
  for (const Isa isa : testing::supported_isas()) {
    b = 2;
    table(isa).float64.step(DType::float64, make_rule(options, false), run, 1);
    EXPECT_DOUBLE_EQ(b, 0.9 * 2 + 0.75 * direction);
    EXPECT_DOUBLE_EQ(update, 0.5 * b);
    EXPECT_EQ(x, 5) << "without a pull the parameter stays";
    b = NAN;
    table(isa).float64.step(DType::float64, make_rule(options, true), run, 1);
    EXPECT_DOUBLE_EQ(b, direction) << "the first buffer is the direction, undamped";
    EXPECT_DOUBLE_EQ(update, 0.5 * direction);
    b = 2;
    const SgdOptions nesterov{.lr = 0.5, .momentum = 0.9, .nesterov = true};
    table(isa).float64.step(DType::float64, make_rule(nesterov, false), run, 1);
    EXPECT_DOUBLE_EQ(b, 0.9 * 2 + 3);
    EXPECT_DOUBLE_EQ(update, 0.5 * (3 + 0.9 * b));
  }
}

TEST(StepFormulas, AdamAndItsRelatives) {
  const double g = 3;
  const double t = 2;
  for (const Isa isa : testing::supported_isas()) {
    for (const bool decoupled : {false, true}) {
      double x = 5, m = 0.5, v = 4, largest = 5, update = 0, gradient = g;
      const AdamOptions options{.lr = 0.25,
                                .beta1 = 0.75,
                                .beta2 = 0.5,
                                .eps = 0.125,
                                .weight_decay = 0.5,
                                .decoupled = decoupled,
                                .amsgrad = true};
      const StepRun<double> run{
          .gradient = &gradient, .states = {&m, &v, &largest}, .parameter = &x, .update = &update};
      table(isa).float64.step(DType::float64, make_rule(options, t), run, 1);
      const double direction = decoupled ? g : g + 0.5 * 5;
      const double first = 0.75 * 0.5 + 0.25 * direction;
      const double second = 0.5 * 4 + 0.5 * direction * direction;
      EXPECT_DOUBLE_EQ(m, first);
      EXPECT_DOUBLE_EQ(v, second);
      EXPECT_DOUBLE_EQ(largest, std::max(5.0, second));
      const double corrected = first / (1 - 0.75 * 0.75);
      const double root = std::sqrt(std::max(5.0, second) / (1 - 0.5 * 0.5));
      const double decay = decoupled ? 0.25 * 0.5 * 5 : 0;
      EXPECT_NEAR(update, 0.25 * corrected / (root + 0.125) + decay, 1e-15);
    }
  }
}

TEST(StepFormulas, Adagrad) {
  for (const Isa isa : testing::supported_isas()) {
    double g = 3, x = 5, sum = 7, update = 0, w = 11;
    const AdagradOptions options{.lr = 0.5, .lr_decay = 0.25, .eps = 0.125, .weight_decay = 0.5};
    const StepRun<double> run{.gradient = &g,
                              .states = {&sum},
                              .parameter = &x,
                              .update = &update,
                              .w = &w,
                              .local_scale = 0.5};
    table(isa).float64.step(DType::float64, make_rule(options, 3), run, 1);
    const double direction = 3 + 0.5 * 5;
    EXPECT_DOUBLE_EQ(sum, 7 + direction * direction);
    EXPECT_DOUBLE_EQ(update, 0.5 / (1 + 2 * 0.25) * direction / (std::sqrt(sum) + 0.125));
    EXPECT_DOUBLE_EQ(x, 11 - 0.5 * update);
  }
}

TEST(StepFormulas, RefusesADtypeOfAnotherStorage) {
  const StepRun<float> run{};
  for (const Isa isa : testing::supported_isas())
    EXPECT_THROW(table(isa).float32.step(DType::float64, StepRule{}, run, 0),
                 std::invalid_argument);
}

}  // namespace
}  // namespace psplus::kernels
