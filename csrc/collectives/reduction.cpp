#include "collectives/reduction.hpp"

#include <stdexcept>
#include <string>

#include "collectives/reduction_internal.hpp"
#include "kernels/kernels.hpp"

namespace psplus::collectives {
namespace {

DType half_dtype(Element element) {
  return element == Element::float16 ? DType::float16 : DType::bfloat16;
}

}  // namespace

std::size_t element_bytes(Element element) {
  switch (element) {
    case Element::uint8:
    case Element::int8:
    case Element::boolean:
      return 1;
    case Element::uint16:
    case Element::int16:
    case Element::float16:
    case Element::bfloat16:
      return 2;
    case Element::uint32:
    case Element::int32:
    case Element::float32:
      return 4;
    case Element::uint64:
    case Element::int64:
    case Element::float64:
    case Element::complex64:
      return 8;
    case Element::complex128:
      return 16;
  }
  throw std::invalid_argument("element_bytes: not an Element");
}

std::string_view name(Element element) {
  switch (element) {
    case Element::uint8:
      return "uint8";
    case Element::int8:
      return "int8";
    case Element::uint16:
      return "uint16";
    case Element::int16:
      return "int16";
    case Element::uint32:
      return "uint32";
    case Element::int32:
      return "int32";
    case Element::uint64:
      return "uint64";
    case Element::int64:
      return "int64";
    case Element::float16:
      return "float16";
    case Element::bfloat16:
      return "bfloat16";
    case Element::float32:
      return "float32";
    case Element::float64:
      return "float64";
    case Element::boolean:
      return "bool";
    case Element::complex64:
      return "complex64";
    case Element::complex128:
      return "complex128";
  }
  throw std::invalid_argument("name: not an Element");
}

std::string_view name(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return "SUM";
    case Reduction::avg:
      return "AVG";
    case Reduction::product:
      return "PRODUCT";
    case Reduction::min:
      return "MIN";
    case Reduction::max:
      return "MAX";
    case Reduction::band:
      return "BAND";
    case Reduction::bor:
      return "BOR";
    case Reduction::bxor:
      return "BXOR";
    case Reduction::premul_sum:
      return "PREMUL_SUM";
  }
  throw std::invalid_argument("name: not a Reduction");
}

void widen_half(Element element, const void* src, float* dst, std::size_t n) {
  kernels::best().float32.widen(half_dtype(element), src, dst, n, false);
}

void narrow_half(Element element, const float* src, void* dst, std::size_t n) {
  kernels::best().float32.pull(half_dtype(element), src, nullptr, 0.0F, dst, n);
}

ReduceFunction reduce_function(Element element, Reduction reduction) {
#if defined(__x86_64__)
  static const auto find = kernels::supported(kernels::Isa::avx2) ? find_avx2 : find_portable;
#else
  constexpr auto find = find_portable;
#endif
  const ReduceFunction found = find(element, reduction);
  if (found == nullptr)
    throw std::invalid_argument("ReduceOp." + std::string(name(reduction)) +
                                " is not defined for tensors of " + std::string(name(element)));
  return found;
}

}  // namespace psplus::collectives
