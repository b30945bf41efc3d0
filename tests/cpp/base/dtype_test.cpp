#include "base/dtype.hpp"

#include <string_view>

#include <gtest/gtest.h>

namespace psplus {
namespace {

struct Row {
  DType dtype;
  std::uint8_t number;
  std::string_view word;
  std::size_t bytes;
  Storage storage;
  std::size_t scalars;
};
constexpr Row kTable[] = {
    {DType::float32, 0, "float32", 4, Storage::float32, 1},
    {DType::float64, 1, "float64", 8, Storage::float64, 1},
    {DType::bfloat16, 2, "bfloat16", 2, Storage::float32, 1},
    {DType::float16, 3, "float16", 2, Storage::float32, 1},
    {DType::complex64, 4, "complex64", 8, Storage::float32, 2},
    {DType::complex128, 5, "complex128", 16, Storage::float64, 2},
};

TEST(DType, EveryTypeHasItsSizeStorageAndNumber) {
  for (const Row& row : kTable) {
    SCOPED_TRACE(row.word);
    EXPECT_EQ(static_cast<std::uint8_t>(row.dtype), row.number);
    EXPECT_EQ(name(row.dtype), row.word);
    EXPECT_EQ(element_bytes(row.dtype), row.bytes);
    EXPECT_EQ(storage_of(row.dtype), row.storage);
    EXPECT_EQ(scalars_per_element(row.dtype), row.scalars);
  }
  EXPECT_EQ(storage_bytes(Storage::float32), 4u);
  EXPECT_EQ(storage_bytes(Storage::float64), 8u);
}

TEST(DType, StrayValuesThrow) {
  for (const int number : {6, 7, 255}) {
    const auto stray = static_cast<DType>(number);
    EXPECT_THROW((void)name(stray), std::invalid_argument);
    EXPECT_THROW((void)element_bytes(stray), std::invalid_argument);
    EXPECT_THROW((void)storage_of(stray), std::invalid_argument);
    EXPECT_THROW((void)scalars_per_element(stray), std::invalid_argument);
  }
  EXPECT_THROW((void)storage_bytes(static_cast<Storage>(2)), std::invalid_argument);
}

}  // namespace
}  // namespace psplus
