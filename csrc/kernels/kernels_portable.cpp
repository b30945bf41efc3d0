// 16-byte vectors, which every 64-bit baseline has (SSE2, NEON); float16 by integer operations.

#include "kernels/step_vector.hpp"

namespace psplus::kernels {
namespace {

struct Portable : VectorTypes<16> {
  static F32 sqrt(F32 value) {
    for (int lane = 0; lane < 4; ++lane) value[lane] = __builtin_sqrtf(value[lane]);
    return value;
  }
  static F64 sqrt(F64 value) {
    for (int lane = 0; lane < 2; ++lane) value[lane] = __builtin_sqrt(value[lane]);
    return value;
  }
  // No baseline has a portable way past the caches.
  template <class V>
  static void stream(void* at, V value) {
    __builtin_memcpy(at, &value, sizeof(V));
  }
  static void fence() { __atomic_thread_fence(__ATOMIC_RELEASE); }

  static U32 where(I32 condition, U32 yes, U32 no) {
    const U32 mask = __builtin_bit_cast(U32, condition);
    return (mask & yes) | (~mask & no);
  }
  static I32 as_signed(U32 value) { return __builtin_bit_cast(I32, value); }

  static F32 widen_f16(U16Half half) {
    const U32 bits = __builtin_convertvector(half, U32);
    const U32 magnitude = (bits & 0x7fff) << 13;  // exponent and mantissa where float32 has them
    const U32 mantissa = magnitude & 0x007f'ffff;
    const U32 exponent = magnitude & 0x0f80'0000;
    const U32 normal = magnitude + ((127 - 15) << 23);
    // 2^-14 + m * 2^-24 less 2^-14: exact, and no float32 subnormal that the processor may flush.
    const F32 smallest_normal = __builtin_bit_cast(F32, U32{} + ((127 - 14) << 23));
    const F32 lifted = __builtin_bit_cast(F32, magnitude + ((127 - 14) << 23));
    const U32 subnormal = __builtin_bit_cast(U32, lifted - smallest_normal);
    const U32 quiet = where(mantissa != 0, U32{} + 0x0040'0000, U32{});
    const U32 special = (magnitude | 0x7f80'0000) | quiet;
    U32 value = where(exponent == 0, subnormal, normal);
    value = where(exponent == 0x0f80'0000, special, value);
    return __builtin_bit_cast(F32, value | ((bits & 0x8000) << 16));
  }

  static U16Half narrow_f16(F32 value) {
    const U32 bits = __builtin_bit_cast(U32, value);
    const U32 magnitude = bits & 0x7fff'ffff;
    const U32 odd = (magnitude >> 13) & 1;
    // Rebias the exponent, round to nearest even; 65520 and above carry into infinity.
    const U32 normal = (magnitude - ((127 - 15) << 23) + 0x0fff + odd) >> 13;
    // The unit in the last place of 0.5f is 2^-24, that of a float16 subnormal: the addition
    // rounds.
    const F32 lifted = __builtin_bit_cast(F32, magnitude) + 0.5F;
    const U32 subnormal = __builtin_bit_cast(U32, lifted) - 0x3f00'0000;
    const I32 signed_magnitude = as_signed(magnitude);
    U32 half = where(signed_magnitude < ((127 - 14) << 23), subnormal, normal);
    half = where(signed_magnitude >= ((127 + 16) << 23), U32{} + 0x7c00, half);
    half = where(signed_magnitude > 0x7f80'0000, U32{} + 0x7e00, half);
    return __builtin_convertvector(half | ((bits >> 16) & 0x8000), U16Half);
  }
};

}  // namespace

const KernelTable& portable_table() noexcept {
  static constexpr KernelTable kTable = StepVectorKernels<Portable>::make_table(Isa::portable);
  return kTable;
}

}  // namespace psplus::kernels
