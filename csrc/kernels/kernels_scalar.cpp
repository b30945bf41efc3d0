// The definition of every kernel, one element at a time.

#include <cmath>
#include <cstddef>

#include "kernels/scalar_codecs.hpp"

namespace psplus::kernels {
namespace scalar {

template <class S>
bool widen(DType dtype, const void* src, S* dst, std::size_t begin, std::size_t end) {
  return with_codec<S>(dtype, [=](auto codec) {
    const auto* in = static_cast<const typename decltype(codec)::Element*>(src);
    bool finite = true;
    for (std::size_t i = begin; i < end; ++i) {
      dst[i] = codec.widen(in[i]);
      finite = finite && std::isfinite(dst[i]);
    }
    return finite;
  });
}

template <class S>
bool delta(DType dtype, const S* before, const void* after, S* out, std::size_t begin,
           std::size_t end) {
  return with_codec<S>(dtype, [=](auto codec) {
    const auto* in = static_cast<const typename decltype(codec)::Element*>(after);
    bool finite = true;
    for (std::size_t i = begin; i < end; ++i) {
      out[i] = before[i] - codec.widen(in[i]);
      finite = finite && std::isfinite(out[i]);
    }
    return finite;
  });
}

template <class S>
void apply(S* dst, const S* src, const PushTerm<S>* terms, std::size_t count, std::size_t begin,
           std::size_t end) noexcept {
  for (std::size_t i = begin; i < end; ++i) {
    S value = src[i];
    for (std::size_t t = 0; t < count; ++t) value -= terms[t].scale * terms[t].delta[i];
    dst[i] = value;
  }
}

template <class S>
void apply_mean(S* dst, const S* src, const S* const* deltas, std::size_t count, S scale,
                std::size_t begin, std::size_t end) noexcept {
  for (std::size_t i = begin; i < end; ++i) {
    if (count == 0) {
      dst[i] = src[i];
      continue;
    }
    S sum = deltas[0][i];
    for (std::size_t t = 1; t < count; ++t) sum += deltas[t][i];
    dst[i] = src[i] - scale * sum;
  }
}

template <class S>
void pull(DType dtype, const S* w, const S* delta, S scale, void* x, std::size_t begin,
          std::size_t end) {
  with_codec<S>(dtype, [=](auto codec) {
    auto* out = static_cast<typename decltype(codec)::Element*>(x);
    for (std::size_t i = begin; i < end; ++i) {
      out[i] = codec.narrow(delta == nullptr ? w[i] : w[i] - scale * delta[i]);
    }
  });
}

bool all_finite(DType dtype, const void* src, std::size_t begin, std::size_t end) {
  const auto check = [=](auto codec) {
    const auto* in = static_cast<const typename decltype(codec)::Element*>(src);
    for (std::size_t i = begin; i < end; ++i) {
      if (!codec.is_finite(in[i])) return false;
    }
    return true;
  };
  if (storage_of(dtype) == Storage::float32) return with_codec<float>(dtype, check);
  return with_codec<double>(dtype, check);
}

template bool widen(DType, const void*, float*, std::size_t, std::size_t);
template bool widen(DType, const void*, double*, std::size_t, std::size_t);
template bool delta(DType, const float*, const void*, float*, std::size_t, std::size_t);
template bool delta(DType, const double*, const void*, double*, std::size_t, std::size_t);
template void apply(float*, const float*, const PushTerm<float>*, std::size_t, std::size_t,
                    std::size_t) noexcept;
template void apply(double*, const double*, const PushTerm<double>*, std::size_t, std::size_t,
                    std::size_t) noexcept;
template void apply_mean(float*, const float*, const float* const*, std::size_t, float, std::size_t,
                         std::size_t) noexcept;
template void apply_mean(double*, const double*, const double* const*, std::size_t, double,
                         std::size_t, std::size_t) noexcept;
template void pull(DType, const float*, const float*, float, void*, std::size_t, std::size_t);
template void pull(DType, const double*, const double*, double, void*, std::size_t, std::size_t);

}  // namespace scalar

namespace {

template <class S>
constexpr StorageKernels<S> kWholeSpan = {
    .widen = [](DType dtype, const void* src, S* dst, std::size_t n,
                bool /*streams*/) { return scalar::widen(dtype, src, dst, 0, n); },
    .delta = [](DType dtype, const S* before, const void* after, S* out,
                std::size_t n) { return scalar::delta(dtype, before, after, out, 0, n); },
    .apply = [](S* dst, const S* src, const PushTerm<S>* terms, std::size_t count,
                std::size_t n) noexcept { scalar::apply(dst, src, terms, count, 0, n); },
    .apply_mean =
        [](S* dst, const S* src, const S* const* deltas, std::size_t count, S scale,
           std::size_t n) noexcept { scalar::apply_mean(dst, src, deltas, count, scale, 0, n); },
    .pull = [](DType dtype, const S* w, const S* delta, S scale, void* x,
               std::size_t n) { scalar::pull(dtype, w, delta, scale, x, 0, n); },
    .step = [](DType dtype, const StepRule& rule, const StepRun<S>& run,
               std::size_t n) { return scalar::step(dtype, rule, run, 0, n); },
};

}  // namespace

const KernelTable& scalar_table() noexcept {
  static constexpr KernelTable kTable = {
      .isa = Isa::scalar,
      .float32 = kWholeSpan<float>,
      .float64 = kWholeSpan<double>,
      .all_finite = [](DType dtype, const void* src,
                       std::size_t n) { return scalar::all_finite(dtype, src, 0, n); },
  };
  return kTable;
}

}  // namespace psplus::kernels
