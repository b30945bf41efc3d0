// 32-byte vectors; compiled for AVX2 and F16C.

#include <immintrin.h>

#include "kernels/step_vector.hpp"

namespace psplus::kernels {
namespace {

struct Avx2 : VectorTypes<32> {
  static F32 widen_f16(U16Half bits) {
    return __builtin_bit_cast(F32, _mm256_cvtph_ps(__builtin_bit_cast(__m128i, bits)));
  }
  static U16Half narrow_f16(F32 value) {
    const __m256 wide = __builtin_bit_cast(__m256, value);
    return __builtin_bit_cast(U16Half, _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
  }
  static F32 sqrt(F32 value) {
    return __builtin_bit_cast(F32, _mm256_sqrt_ps(__builtin_bit_cast(__m256, value)));
  }
  static F64 sqrt(F64 value) {
    return __builtin_bit_cast(F64, _mm256_sqrt_pd(__builtin_bit_cast(__m256d, value)));
  }
  static void stream(void* at, F32 value) {
    _mm256_stream_ps(static_cast<float*>(at), __builtin_bit_cast(__m256, value));
  }
  static void stream(void* at, F64 value) {
    _mm256_stream_pd(static_cast<double*>(at), __builtin_bit_cast(__m256d, value));
  }
  static void stream(void* at, U16Half value) {
    _mm_stream_si128(static_cast<__m128i*>(at), __builtin_bit_cast(__m128i, value));
  }
  static void fence() { _mm_sfence(); }
};

}  // namespace

const KernelTable& avx2_table() noexcept {
  static constexpr KernelTable kTable = StepVectorKernels<Avx2>::make_table(Isa::avx2);
  return kTable;
}

}  // namespace psplus::kernels
