#pragma once

// The vector form of the step kernel, and the table of all vector kernels of an instruction set;
// see kernels_vector.hpp for what `Arch` is and why nothing here calls the standard library.

#include "kernels/kernels_vector.hpp"
#include "kernels/step_arithmetic.hpp"

namespace psplus::kernels {

template <class Arch>
struct StepVectorKernels {
  using Kernels = VectorKernels<Arch>;
  template <class S>
  using Vector = typename Kernels::template Vector<S>;
  template <class S>
  static constexpr std::size_t kLanes = Kernels::template kLanes<S>;

  struct Math {
    template <class V>
    static V sqrt(V value) {
      return Arch::sqrt(value);
    }
    template <class V>
    static V larger(V a, V b) {
      return a > b ? a : b;
    }
  };

  static constexpr std::size_t kPageBytes = 4096;
  template <class S>
  static constexpr std::size_t kPageOf = kPageBytes / sizeof(S);

  template <bool streams, class V>
  static void put(void* at, V value) {
    if constexpr (streams) {
      Arch::stream(at, value);
    } else {
      Kernels::store(at, value);
    }
  }

  /// Writes a parameter through its codec, past the caches or not.
  template <bool streams, class Codec, class S>
  static void put_parameter(typename Codec::Element* at, Vector<S> value) {
    if constexpr (streams) {
      Codec::stream(at, value);
    } else {
      Codec::write(at, value);
    }
  }

  template <StepKind kind, bool streams, class Codec, class S>
  static std::size_t run(const StepRule& rule, const StepRun<S>& r, std::size_t n, bool& finite) {
    using Element = typename Codec::Element;
    const StepConstants<S> c{rule};
    const auto* gradient = static_cast<const Element*>(r.gradient);
    auto* parameter = static_cast<Element*>(r.parameter);
    constexpr std::size_t kStates = kind == StepKind::adam ? 3 : 1;
    Element* states[kStates];
    for (std::size_t s = 0; s < kStates; ++s) states[s] = static_cast<Element*>(r.states[s]);
    const std::size_t state_count = rule.state_count();
    const bool reads_parameter = rule.reads_parameter();
    typename Kernels::template Bits<S> gathered = {};
    constexpr std::size_t kStep = kLanes<S>;
    std::size_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      if (r.w != nullptr) Kernels::prefetch(r.w + i, Kernels::kLinesAhead);
      // The page that is written next: its walk would stall the stores.
      if (streams && i % kPageOf<S> == 0) Kernels::prefetch(r.update + i, kPageBytes);
      Vector<S> g = Codec::read(gradient + i);
      if (rule.maximize) g = -g;
      Vector<S> before = {};
      if (reads_parameter) {
        before = Codec::read(parameter + i);
        g += c.weight_decay * before;
      }
      Vector<S> values[kMaxStates] = {};
      for (std::size_t s = 0; s < kStates; ++s) {
        if (s < state_count && !c.first) values[s] = Codec::read(states[s] + i);
      }
      Vector<S> update = step_update<Math, kind>(c, g, values);
      for (std::size_t s = 0; s < kStates; ++s) {
        if (s < state_count) Codec::write(states[s] + i, values[s]);
      }
      if (reads_parameter) update += c.decay * before;
      gathered |= __builtin_bit_cast(typename Kernels::template Bits<S>, update - update);
      put<streams>(r.update + i, update);
      if (r.w != nullptr) {
        put_parameter<streams, Codec, S>(parameter + i,
                                         Kernels::load_shared(r.w + i) - r.local_scale * update);
      }
    }
    if constexpr (streams) Arch::fence();
    finite = Kernels::template no_nan<S>(gathered);
    return i;
  }

  template <StepKind kind, class S>
  static std::size_t run_kind(DType dtype, const StepRule& rule, const StepRun<S>& r, std::size_t n,
                              bool& finite) {
    return Kernels::template with_codec<S>(dtype, [&](auto codec) {
      using Codec = decltype(codec);
      constexpr std::size_t kStored = kLanes<S> * sizeof(typename Codec::Element);
      const bool aligned = reinterpret_cast<std::uintptr_t>(r.parameter) % kStored == 0;
      if (r.streams && aligned) return run<kind, true, Codec, S>(rule, r, n, finite);
      return run<kind, false, Codec, S>(rule, r, n, finite);
    });
  }

  template <class S>
  static bool step(DType dtype, const StepRule& rule, const StepRun<S>& r, std::size_t n) {
    std::size_t tail = 0;
    bool finite = true;
    switch (rule.kind) {
      case StepKind::sgd:
        tail = run_kind<StepKind::sgd>(dtype, rule, r, n, finite);
        break;
      case StepKind::adam:
        tail = run_kind<StepKind::adam>(dtype, rule, r, n, finite);
        break;
      case StepKind::adagrad:
        tail = run_kind<StepKind::adagrad>(dtype, rule, r, n, finite);
        break;
    }
    const bool tail_finite = scalar::step(dtype, rule, r, tail, n);
    return finite && tail_finite;
  }

  template <class S>
  static constexpr StorageKernels<S> kFor = {
      .widen = &Kernels::template widen<S>,
      .delta = &Kernels::template delta<S>,
      .apply = &Kernels::template apply<S>,
      .apply_mean = &Kernels::template apply_mean<S>,
      .pull = &Kernels::template pull<S>,
      .step = &step<S>,
  };

  static constexpr KernelTable make_table(Isa isa) {
    return {.isa = isa,
            .float32 = kFor<float>,
            .float64 = kFor<double>,
            .all_finite = &Kernels::all_finite};
  }
};

}  // namespace psplus::kernels
