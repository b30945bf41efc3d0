#pragma once

#include <utility>

#include <pybind11/pybind11.h>

#include "base/status.hpp"

namespace psplus::bindings {

/// Adds `set_error_types`, by which the package hands over its exception classes.
void bind_errors(pybind11::module_& module);

/// The only place where a Status becomes an exception: of the psplus class for its code, or
/// KeyboardInterrupt when a wait was interrupted by a signal. Needs the GIL.
void throw_if_error(const Status& status);

template <class T>
T value_or_throw(Result<T> result) {
  throw_if_error(result.status());
  return std::move(result).value();
}

}  // namespace psplus::bindings
