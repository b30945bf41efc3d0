#pragma once

#include <random>
#include <string>
#include <vector>

#include "store/layout.hpp"

namespace psplus::testing {

/// Parameters of random dtypes and shapes, among them scalars (no dimension), empty ones and ones
/// over several chunks of `chunk_bytes`.
inline std::vector<store::ParamSpec> random_params(std::mt19937_64& random,
                                                   std::size_t chunk_bytes) {
  std::vector<store::ParamSpec> params(random() % 12);
  for (std::size_t i = 0; i < params.size(); ++i) {
    store::ParamSpec& param = params[i];
    param.name = "layer." + std::to_string(i);
    param.dtype = static_cast<DType>(random() % 6);
    switch (random() % 5) {
      case 0:
        break;  // a scalar
      case 1:
        param.shape = {static_cast<std::int64_t>(random() % 4), 0, 3};
        break;
      case 2:
        param.shape = {static_cast<std::int64_t>(random() % 9 + 1)};
        break;
      case 3:
        param.shape = {static_cast<std::int64_t>(chunk_bytes / 4 - 2 + random() % 5)};
        break;
      case 4:
        param.shape = {3, static_cast<std::int64_t>(random() % (chunk_bytes / 2) + 1)};
        break;
    }
  }
  return params;
}

}  // namespace psplus::testing
