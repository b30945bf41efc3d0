#pragma once

// The vector form of the kernels, one body for all instruction sets. Included by the file of each
// set, whose `Arch` supplies vector types, lane width and the float16 conversions:
//
//   struct Arch : VectorTypes<bytes> {
//     static F32 widen_f16(U16Half bits);     // quiet NaNs, exact
//     static U16Half narrow_f16(F32 value);   // nearest even; never given a NaN but 0x7fc00000
//     static F32 sqrt(F32 value);             // and F64
//     static void stream(void* at, F32 value);  // F64, U16Half: a store past the caches, `at` a
//                                               // multiple of the vector's bytes
//     static void fence();                    // orders streamed stores before later stores
//   };
//
// `Arch` must lie in an unnamed namespace: it gives every function here internal linkage, so that
// the linker cannot hand a copy compiled for a wider instruction set to the other files. For the
// same reason nothing here calls an inline function of the standard library.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/kernels_internal.hpp"

namespace psplus::kernels {

/// Vectors of `bytes` bytes; `...Half` has the lanes of F32 in half the bytes.
template <std::size_t bytes>
struct VectorTypes {
  static constexpr std::size_t kBytes = bytes;
  typedef float F32 __attribute__((vector_size(bytes)));
  typedef double F64 __attribute__((vector_size(bytes)));
  typedef std::int32_t I32 __attribute__((vector_size(bytes)));
  typedef std::uint32_t U32 __attribute__((vector_size(bytes)));
  typedef std::uint64_t U64 __attribute__((vector_size(bytes)));
  typedef std::uint16_t U16 __attribute__((vector_size(bytes)));
  typedef std::uint16_t U16Half __attribute__((vector_size(bytes / 2)));
};

template <class Arch>
struct VectorKernels {
  using F32 = typename Arch::F32;
  using F64 = typename Arch::F64;
  using I32 = typename Arch::I32;
  using U32 = typename Arch::U32;
  using U64 = typename Arch::U64;
  using U16 = typename Arch::U16;
  using U16Half = typename Arch::U16Half;
  template <class S>
  using Vector = std::conditional_t<std::is_same_v<S, float>, F32, F64>;
  template <class S>
  using Bits = std::conditional_t<std::is_same_v<S, float>, U32, U64>;
  template <class S>
  static constexpr std::size_t kLanes = Arch::kBytes / sizeof(S);

  template <class V>
  static V load(const void* at) {
    V value;
    __builtin_memcpy(&value, at, sizeof(V));
    return value;
  }

  /// One vector of memory that others may be writing, read by one instruction where there is one.
  /// The caller finds out afterwards whether what it read belongs together.
  template <class S>
  static Vector<S> load_shared(const S* at) {
    typedef Vector<S> Shared __attribute__((may_alias, aligned(alignof(S))));
    return *reinterpret_cast<const volatile Shared*>(at);
  }

  template <class V>
  static void store(void* at, V value) {
    __builtin_memcpy(at, &value, sizeof(V));
  }

  template <class S>
  struct Plain {
    using Element = S;
    static Vector<S> read(const S* at) { return load<Vector<S>>(at); }
    static void write(S* at, Vector<S> value) { store(at, value); }
    static void stream(S* at, Vector<S> value) { Arch::stream(at, value); }
  };

  struct BFloat16 {
    using Element = std::uint16_t;
    static F32 read(const std::uint16_t* at) {
      return __builtin_bit_cast(F32, __builtin_convertvector(load<U16Half>(at), U32) << 16);
    }
    static U16Half narrow(F32 value) {
      const U32 bits = __builtin_bit_cast(U32, value);
      const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      const U32 nan = __builtin_bit_cast(U32, value != value);
      return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), U16Half);
    }
    static void write(std::uint16_t* at, F32 value) { store(at, narrow(value)); }
    static void stream(std::uint16_t* at, F32 value) { Arch::stream(at, narrow(value)); }
  };

  struct Float16 {
    using Element = std::uint16_t;
    static F32 read(const std::uint16_t* at) { return Arch::widen_f16(load<U16Half>(at)); }
    static U16Half narrow(F32 value) {
      const U32 nan = __builtin_bit_cast(U32, value != value);
      const U32 bits = (nan & 0x7fc0'0000) | (~nan & __builtin_bit_cast(U32, value));
      return Arch::narrow_f16(__builtin_bit_cast(F32, bits));
    }
    static void write(std::uint16_t* at, F32 value) { store(at, narrow(value)); }
    static void stream(std::uint16_t* at, F32 value) { Arch::stream(at, narrow(value)); }
  };

  /// Calls `body` with the codec of `dtype`, which must be held as S.
  template <class S, class Body>
  static auto with_codec(DType dtype, Body body) {
    constexpr bool kFloat = std::is_same_v<S, float>;
    constexpr Storage kHeld = kFloat ? Storage::float32 : Storage::float64;
    if constexpr (kFloat) {
      if (dtype == DType::float32 || dtype == DType::complex64) return body(Plain<float>{});
      if (dtype == DType::bfloat16) return body(BFloat16{});
      if (dtype == DType::float16) return body(Float16{});
    } else {
      if (dtype == DType::float64 || dtype == DType::complex128) return body(Plain<double>{});
    }
    throw_storage_mismatch(dtype, kHeld);
  }

  // Segments lie in small pages, whose page walks stop the processor's own prefetching. Reading
  // ahead by hand saves 10-15 % of a step (25 M parameters) and about 10 % of an apply of 100 MB;
  // measured for 256 to 8192 bytes ahead, which differ by less than they vary.
  static constexpr std::size_t kLinesAhead = 256;

  static void prefetch(const void* at, std::size_t bytes_ahead) {
    __builtin_prefetch(static_cast<const char*>(at) + bytes_ahead);
  }

  /// Calls step(i) for whole vectors of `lanes` scalars. @return where the tail begins.
  template <std::size_t lanes, class Step>
  static std::size_t sweep(std::size_t n, Step step) {
    std::size_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      step(i);
      step(i + lanes);
      step(i + 2 * lanes);
      step(i + 3 * lanes);
    }
    for (; i + lanes <= n; i += lanes) step(i);
    return i;
  }

  /// Whether a bit of `mask` is set in any lane of `value`.
  template <class V, class Lane>
  static bool any(V value, Lane mask) {
    Lane seen = 0;
    for (std::size_t lane = 0; lane < sizeof(V) / sizeof(Lane); ++lane) {
      seen = static_cast<Lane>(seen | value[lane]);
    }
    return (seen & mask) != 0;
  }

  /// For bits gathered from `x - x`: zero in every lane where x was finite, a NaN elsewhere. The
  /// sign is left out, for x - x is -0 when the caller rounds downwards.
  template <class S>
  static bool no_nan(Bits<S> gathered) {
    if constexpr (std::is_same_v<S, float>) {
      return !any(gathered, std::uint32_t{0x7fff'ffff});
    } else {
      return !any(gathered, std::uint64_t{0x7fff'ffff'ffff'ffff});
    }
  }

  /// @return where the tail begins; `finite` says whether what comes before is.
  template <bool streams, class Codec, class S>
  static std::size_t widen_vectors(const typename Codec::Element* in, S* dst, std::size_t n,
                                   bool& finite) {
    Bits<S> gathered = {};
    const std::size_t tail = sweep<kLanes<S>>(n, [=, &gathered](std::size_t i) {
      const Vector<S> value = Codec::read(in + i);
      gathered |= __builtin_bit_cast(Bits<S>, value - value);
      if constexpr (streams) {
        Arch::stream(dst + i, value);
      } else {
        store(dst + i, value);
      }
    });
    if constexpr (streams) Arch::fence();
    finite = no_nan<S>(gathered);
    return tail;
  }

  template <class S>
  static bool widen(DType dtype, const void* src, S* dst, std::size_t n, bool streams) {
    bool finite = true;
    const std::size_t tail = with_codec<S>(dtype, [=, &finite](auto codec) {
      using Codec = decltype(codec);
      const auto* in = static_cast<const typename Codec::Element*>(src);
      if (streams && reinterpret_cast<std::uintptr_t>(dst) % Arch::kBytes == 0)
        return widen_vectors<true, Codec>(in, dst, n, finite);
      return widen_vectors<false, Codec>(in, dst, n, finite);
    });
    const bool tail_finite = scalar::widen(dtype, src, dst, tail, n);
    return finite && tail_finite;
  }

  template <class S>
  static bool delta(DType dtype, const S* before, const void* after, S* out, std::size_t n) {
    Bits<S> gathered = {};
    const std::size_t tail = with_codec<S>(dtype, [=, &gathered](auto codec) {
      const auto* in = static_cast<const typename decltype(codec)::Element*>(after);
      Bits<S> bits = {};
      const std::size_t end = sweep<kLanes<S>>(n, [=, &bits](std::size_t i) {
        const Vector<S> change = load<Vector<S>>(before + i) - codec.read(in + i);
        bits |= __builtin_bit_cast(Bits<S>, change - change);
        store(out + i, change);
      });
      gathered = bits;
      return end;
    });
    const bool tail_finite = scalar::delta(dtype, before, after, out, tail, n);
    return no_nan<S>(gathered) && tail_finite;
  }

  /// Terms known when compiled: pointers and scales stay in registers.
  template <std::size_t count, class S>
  static std::size_t apply_few(S* dst, const S* src, const PushTerm<S>* terms, std::size_t n) {
    const S* deltas[count];
    Vector<S> scales[count];
    for (std::size_t t = 0; t < count; ++t) {
      deltas[t] = terms[t].delta;
      scales[t] = Vector<S>{} + terms[t].scale;
    }
    return sweep<kLanes<S>>(n, [=](std::size_t i) {
      prefetch(src + i, kLinesAhead);
      for (std::size_t t = 0; t < count; ++t) prefetch(deltas[t] + i, kLinesAhead);
      Vector<S> value = load<Vector<S>>(src + i);
      for (std::size_t t = 0; t < count; ++t) {
        value -= scales[t] * load<Vector<S>>(deltas[t] + i);
      }
      store(dst + i, value);
    });
  }

  /// One block of `vectors` vectors at `i`, all terms while the sums are in registers.
  template <std::size_t vectors, class S>
  static void apply_block(S* dst, const S* src, const PushTerm<S>* terms, std::size_t count,
                          std::size_t i) {
    Vector<S> value[vectors];
    for (std::size_t v = 0; v < vectors; ++v) value[v] = load<Vector<S>>(src + i + v * kLanes<S>);
    for (std::size_t t = 0; t < count; ++t) {
      const S* delta = terms[t].delta + i;
      const Vector<S> scale = Vector<S>{} + terms[t].scale;
      for (std::size_t v = 0; v < vectors; ++v) {
        value[v] -= scale * load<Vector<S>>(delta + v * kLanes<S>);
      }
    }
    for (std::size_t v = 0; v < vectors; ++v) store(dst + i + v * kLanes<S>, value[v]);
  }

  template <class S>
  static void apply(S* dst, const S* src, const PushTerm<S>* terms, std::size_t count,
                    std::size_t n) noexcept {
    std::size_t i = 0;
    if (count == 0) {
      i = sweep<kLanes<S>>(n, [=](std::size_t at) { store(dst + at, load<Vector<S>>(src + at)); });
    } else if (count == 1) {
      i = apply_few<1>(dst, src, terms, n);
    } else if (count == 2) {
      i = apply_few<2>(dst, src, terms, n);
    } else {
      constexpr std::size_t kBlock = 8 * kLanes<S>;
      for (; i + kBlock <= n; i += kBlock) apply_block<8>(dst, src, terms, count, i);
      for (; i + kLanes<S> <= n; i += kLanes<S>) apply_block<1>(dst, src, terms, count, i);
    }
    scalar::apply(dst, src, terms, count, i, n);
  }

  /// One block of `vectors` vectors at `i`; `count` is at least 1.
  template <std::size_t vectors, class S>
  static void apply_mean_block(S* dst, const S* src, const S* const* deltas, std::size_t count,
                               S scale, std::size_t i) {
    Vector<S> sum[vectors];
    for (std::size_t v = 0; v < vectors; ++v) {
      sum[v] = load<Vector<S>>(deltas[0] + i + v * kLanes<S>);
    }
    for (std::size_t t = 1; t < count; ++t) {
      const S* delta = deltas[t] + i;
      for (std::size_t v = 0; v < vectors; ++v) {
        sum[v] += load<Vector<S>>(delta + v * kLanes<S>);
      }
    }
    for (std::size_t v = 0; v < vectors; ++v) {
      const std::size_t at = i + v * kLanes<S>;
      store(dst + at, load<Vector<S>>(src + at) - (Vector<S>{} + scale) * sum[v]);
    }
  }

  template <class S>
  static void apply_mean(S* dst, const S* src, const S* const* deltas, std::size_t count, S scale,
                         std::size_t n) noexcept {
    if (count == 0) {
      apply<S>(dst, src, nullptr, 0, n);
      return;
    }
    constexpr std::size_t kBlock = 8 * kLanes<S>;
    std::size_t i = 0;
    for (; i + kBlock <= n; i += kBlock) apply_mean_block<8>(dst, src, deltas, count, scale, i);
    for (; i + kLanes<S> <= n; i += kLanes<S>) {
      apply_mean_block<1>(dst, src, deltas, count, scale, i);
    }
    scalar::apply_mean(dst, src, deltas, count, scale, i, n);
  }

  template <class S>
  static void pull(DType dtype, const S* w, const S* delta, S scale, void* x, std::size_t n) {
    const std::size_t tail = with_codec<S>(dtype, [=](auto codec) {
      auto* out = static_cast<typename decltype(codec)::Element*>(x);
      if (delta == nullptr) {
        return sweep<kLanes<S>>(n,
                                [=](std::size_t i) { codec.write(out + i, load_shared(w + i)); });
      }
      const Vector<S> factor = Vector<S>{} + scale;
      return sweep<kLanes<S>>(n, [=](std::size_t i) {
        codec.write(out + i, load_shared(w + i) - factor * load<Vector<S>>(delta + i));
      });
    });
    scalar::pull(dtype, w, delta, scale, x, tail, n);
  }

  /// @return where the tail begins; `finite` says whether what comes before is.
  template <class S>
  static std::size_t floats_finite(const void* src, std::size_t n, bool& finite) {
    const S* in = static_cast<const S*>(src);
    Bits<S> gathered = {};
    const std::size_t tail = sweep<kLanes<S>>(n, [=, &gathered](std::size_t i) {
      const auto value = load<Vector<S>>(in + i);
      gathered |= __builtin_bit_cast(Bits<S>, value - value);
    });
    finite = no_nan<S>(gathered);
    return tail;
  }

  /// The same for 16-bit floats whose infinity is `infinity`: a magnitude that reaches it carries
  /// into the top bit.
  static std::size_t halves_finite(const void* src, std::uint16_t infinity, std::size_t n,
                                   bool& finite) {
    const auto* in = static_cast<const std::uint16_t*>(src);
    const U16 lift = U16{} + static_cast<std::uint16_t>(0x8000 - infinity);
    const U16 magnitude = U16{} + std::uint16_t{0x7fff};
    U16 gathered = {};
    const std::size_t tail = sweep<kLanes<std::uint16_t>>(
        n, [=, &gathered](std::size_t i) { gathered |= (load<U16>(in + i) & magnitude) + lift; });
    finite = !any(gathered, std::uint16_t{0x8000});
    return tail;
  }

  static bool all_finite(DType dtype, const void* src, std::size_t n) {
    bool finite = true;
    std::size_t tail = 0;
    switch (dtype) {
      case DType::float32:
      case DType::complex64:
        tail = floats_finite<float>(src, n, finite);
        break;
      case DType::float64:
      case DType::complex128:
        tail = floats_finite<double>(src, n, finite);
        break;
      case DType::bfloat16:
        tail = halves_finite(src, 0x7f80, n, finite);
        break;
      case DType::float16:
        tail = halves_finite(src, 0x7c00, n, finite);
        break;
    }
    return finite && scalar::all_finite(dtype, src, tail, n);
  }
};

}  // namespace psplus::kernels
