#pragma once

// What we use of torch, and all differences between the versions that we build against. The old
// names of the virtual functions (_allgather_base and so on) are overridden: torch 2.14 renamed
// them and calls the old ones through forwarding functions.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <string>

#include "base/status.hpp"

namespace psplus::pg {

/// How calls end that a group's shutdown finds under way.
[[nodiscard]] inline Status shut_down() {
  return {StatusCode::kClosed, "the process group was shut down"};
}

/// What Python sees as torch.distributed.DistBackendError; ValueError for kConfig.
[[nodiscard]] inline std::exception_ptr to_exception(const Status& status) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
  if (status.code() == StatusCode::kConfig)
    return std::make_exception_ptr(c10::ValueError(here, "psplus: " + status.message()));
  return std::make_exception_ptr(c10::DistBackendError(here, "psplus: " + status.message()));
}

inline void throw_if_failed(const Status& status) {
  if (!status.ok()) std::rethrow_exception(to_exception(status));
}

}  // namespace psplus::pg
