#include <stdexcept>
#include <string>

#include "kernels/kernels_internal.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace psplus::kernels {
namespace {

#if defined(__x86_64__)
bool has_f16c() noexcept {
  // Asked of the processor itself: clang 14 does not know the name in __builtin_cpu_supports.
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// __builtin_cpu_supports also asks whether the system saves the wide registers.
bool has_avx2() noexcept { return __builtin_cpu_supports("avx2") != 0 && has_f16c(); }

bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
}
#else
bool has_avx2() noexcept { return false; }
bool has_avx512() noexcept { return false; }
#endif

}  // namespace

void throw_storage_mismatch(DType dtype, Storage storage) {
  const std::string held = storage == Storage::float32 ? "float32" : "float64";
  throw std::invalid_argument("a " + std::string(name(dtype)) +
                              " parameter given to the kernels for " + held +
                              " storage; choose them by storage_of(dtype)");
}

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  throw std::invalid_argument("name: not an Isa");
}

bool supported(Isa isa) noexcept {
  switch (isa) {
    case Isa::scalar:
    case Isa::portable:
      return true;
    case Isa::avx2:
      return has_avx2();
    case Isa::avx512:
      return has_avx512();
  }
  return false;
}

Isa best_isa() noexcept { return best().isa; }

const KernelTable& table(Isa isa) {
  if (!supported(isa)) {
    throw std::invalid_argument("no " + std::string(name(isa)) +
                                " kernels in this build or on this processor");
  }
  switch (isa) {
    case Isa::scalar:
      return scalar_table();
    case Isa::portable:
      return portable_table();
#if defined(__x86_64__)
    case Isa::avx2:
      return avx2_table();
    case Isa::avx512:
      return avx512_table();
#else
    case Isa::avx2:
    case Isa::avx512:
      break;  // not supported(), refused above
#endif
  }
  throw std::invalid_argument("table: not an Isa");
}

const KernelTable& best() noexcept {
  static const KernelTable& chosen = supported(Isa::avx512) ? table(Isa::avx512)
                                     : supported(Isa::avx2) ? table(Isa::avx2)
                                                            : table(Isa::portable);
  return chosen;
}

}  // namespace psplus::kernels
