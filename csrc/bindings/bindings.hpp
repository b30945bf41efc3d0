#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <pybind11/pybind11.h>

#include "worker/dense_stream.hpp"
#include "worker/session.hpp"

namespace psplus::bindings {

void bind_session(pybind11::module_& module);
void bind_dense_stream(pybind11::module_& module);
void bind_fused_step(pybind11::module_& module);
void bind_gradient_watch(pybind11::module_& module);
void bind_process_group(pybind11::module_& module);

[[nodiscard]] inline nanoseconds to_duration(double seconds) {
  constexpr double kLongest = 1e9;  // thirty years; beyond that nanoseconds overflow
  return nanoseconds{static_cast<std::int64_t>(std::min(seconds, kLongest) * 1e9)};
}

/// The bytes of a blob, which must outlive them; none for None.
[[nodiscard]] inline std::span<const std::byte> bytes_of(
    const std::optional<pybind11::bytes>& blob) {
  const std::string_view bytes = blob ? std::string_view{*blob} : std::string_view{};
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

}  // namespace psplus::bindings
