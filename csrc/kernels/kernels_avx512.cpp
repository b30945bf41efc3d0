// 64-byte vectors; compiled for AVX-512 F, BW, DQ and VL.

#include <immintrin.h>

#include "kernels/step_vector.hpp"

namespace psplus::kernels {
namespace {

// The zero-masked forms, all lanes on: g++ 12 takes the plain ones' own placeholder for a variable
// that is used uninitialised.
struct Avx512 : VectorTypes<64> {
  static F32 widen_f16(U16Half bits) {
    const __m256i half = __builtin_bit_cast(__m256i, bits);
    return __builtin_bit_cast(F32, _mm512_maskz_cvtph_ps(kAllLanes, half));
  }
  static U16Half narrow_f16(F32 value) {
    const __m512 wide = __builtin_bit_cast(__m512, value);
    return __builtin_bit_cast(U16Half,
                              _mm512_maskz_cvtps_ph(kAllLanes, wide, _MM_FROUND_TO_NEAREST_INT));
  }
  static F32 sqrt(F32 value) {
    const __m512 wide = __builtin_bit_cast(__m512, value);
    return __builtin_bit_cast(F32, _mm512_maskz_sqrt_ps(kAllLanes, wide));
  }
  static F64 sqrt(F64 value) {
    const __m512d wide = __builtin_bit_cast(__m512d, value);
    return __builtin_bit_cast(F64, _mm512_maskz_sqrt_pd(0xff, wide));
  }
  static void stream(void* at, F32 value) {
    _mm512_stream_ps(static_cast<float*>(at), __builtin_bit_cast(__m512, value));
  }
  static void stream(void* at, F64 value) {
    _mm512_stream_pd(static_cast<double*>(at), __builtin_bit_cast(__m512d, value));
  }
  static void stream(void* at, U16Half value) {
    _mm256_stream_si256(static_cast<__m256i*>(at), __builtin_bit_cast(__m256i, value));
  }
  static void fence() { _mm_sfence(); }

 private:
  static constexpr __mmask16 kAllLanes = 0xffff;
};

}  // namespace

const KernelTable& avx512_table() noexcept {
  static constexpr KernelTable kTable = StepVectorKernels<Avx512>::make_table(Isa::avx512);
  return kTable;
}

}  // namespace psplus::kernels
