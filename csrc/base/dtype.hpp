#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>

namespace psplus {

/// Element type of a parameter. The numbers travel in frames and lie in segments: never renumber.
enum class DType : std::uint8_t {
  float32 = 0,
  float64 = 1,
  bfloat16 = 2,
  float16 = 3,
  complex64 = 4,
  complex128 = 5,
};

/// Scalar type that servers and push slots hold for a parameter. The numbers lie in segments.
enum class Storage : std::uint8_t { float32 = 0, float64 = 1 };

/// Bytes of one element. Throws std::invalid_argument when `dtype` is none of the enumerators.
[[nodiscard]] constexpr std::size_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
    case DType::float16:
      return 2;
    case DType::float32:
      return 4;
    case DType::float64:
    case DType::complex64:
      return 8;
    case DType::complex128:
      return 16;
  }
  throw std::invalid_argument("element_bytes: not a DType");
}

/// torch's word for the dtype, such as "bfloat16". Throws std::invalid_argument for a stray value.
[[nodiscard]] constexpr std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::float64:
      return "float64";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float16:
      return "float16";
    case DType::complex64:
      return "complex64";
    case DType::complex128:
      return "complex128";
  }
  throw std::invalid_argument("name: not a DType");
}

/// What servers and slots hold for a parameter of this dtype: 16-bit parameters are kept in
/// float32, a complex element is two scalars. Throws std::invalid_argument for a stray value.
[[nodiscard]] constexpr Storage storage_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
    case DType::bfloat16:
    case DType::float16:
    case DType::complex64:
      return Storage::float32;
    case DType::float64:
    case DType::complex128:
      return Storage::float64;
  }
  throw std::invalid_argument("storage_of: not a DType");
}

/// Bytes of one storage scalar. Throws std::invalid_argument for a stray value.
[[nodiscard]] constexpr std::size_t storage_bytes(Storage storage) {
  switch (storage) {
    case Storage::float32:
      return 4;
    case Storage::float64:
      return 8;
  }
  throw std::invalid_argument("storage_bytes: not a Storage");
}

/// Storage scalars of one element: 2 for complex dtypes (real, imaginary), else 1.
/// Throws std::invalid_argument for a stray value.
[[nodiscard]] constexpr std::size_t scalars_per_element(DType dtype) {
  switch (dtype) {
    case DType::float32:
    case DType::float64:
    case DType::bfloat16:
    case DType::float16:
      return 1;
    case DType::complex64:
    case DType::complex128:
      return 2;
  }
  throw std::invalid_argument("scalars_per_element: not a DType");
}

/// Calls `use` with a scalar of the type that `storage` holds, for its type alone.
template <class F>
void with_storage(Storage storage, F use) {
  if (storage == Storage::float32)
    use(float{});
  else
    use(double{});
}

}  // namespace psplus
