// 32-byte vectors; compiled for AVX2 and F16C.

#include <immintrin.h>

#include "kernels/kernels_vector.hpp"

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
};

}  // namespace

const KernelTable& avx2_table() noexcept {
  static constexpr KernelTable kTable = VectorKernels<Avx2>::make_table(Isa::avx2);
  return kTable;
}

}  // namespace psplus::kernels
