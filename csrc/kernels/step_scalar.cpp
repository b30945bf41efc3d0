// The definition of the step kernel, one element at a time.

#include <cmath>

#include "kernels/scalar_codecs.hpp"
#include "kernels/step_arithmetic.hpp"

namespace psplus::kernels {
namespace {

struct Math {
  template <class S>
  static S sqrt(S value) {
    return std::sqrt(value);
  }
  template <class S>
  static S larger(S a, S b) {
    return a > b ? a : b;
  }
};

template <StepKind kind, class S>
bool run(DType dtype, const StepRule& rule, const StepRun<S>& r, std::size_t begin,
         std::size_t end) {
  const StepConstants<S> c{rule};
  const std::size_t state_count = rule.state_count();
  const bool reads_parameter = rule.reads_parameter();
  return scalar::with_codec<S>(dtype, [&](auto codec) {
    using Element = typename decltype(codec)::Element;
    const auto* gradient = static_cast<const Element*>(r.gradient);
    auto* parameter = static_cast<Element*>(r.parameter);
    bool finite = true;
    for (std::size_t i = begin; i < end; ++i) {
      S g = codec.widen(gradient[i]);
      if (rule.maximize) g = -g;
      const S before = reads_parameter ? codec.widen(parameter[i]) : S{0};
      if (reads_parameter) g += c.weight_decay * before;
      S states[kMaxStates] = {};
      for (std::size_t s = 0; s < state_count && !c.first; ++s)
        states[s] = codec.widen(static_cast<const Element*>(r.states[s])[i]);
      S update = step_update<Math, kind>(c, g, states);
      for (std::size_t s = 0; s < state_count; ++s)
        static_cast<Element*>(r.states[s])[i] = codec.narrow(states[s]);
      if (reads_parameter) update += c.decay * before;
      r.update[i] = update;
      finite = finite && std::isfinite(update);
      if (r.w == nullptr) continue;
      const S w = *static_cast<const volatile S*>(r.w + i);  // others may be writing it
      parameter[i] = codec.narrow(w - r.local_scale * update);
    }
    return finite;
  });
}

}  // namespace

namespace scalar {

template <class S>
bool step(DType dtype, const StepRule& rule, const StepRun<S>& r, std::size_t begin,
          std::size_t end) {
  switch (rule.kind) {
    case StepKind::sgd:
      return run<StepKind::sgd>(dtype, rule, r, begin, end);
    case StepKind::adam:
      return run<StepKind::adam>(dtype, rule, r, begin, end);
    case StepKind::adagrad:
      return run<StepKind::adagrad>(dtype, rule, r, begin, end);
  }
  return true;
}

template bool step(DType, const StepRule&, const StepRun<float>&, std::size_t, std::size_t);
template bool step(DType, const StepRule&, const StepRun<double>&, std::size_t, std::size_t);

}  // namespace scalar
}  // namespace psplus::kernels
