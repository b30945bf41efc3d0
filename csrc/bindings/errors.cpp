#include "bindings/errors.hpp"

#include <pybind11/stl.h>

#include <map>
#include <string>

namespace psplus::bindings {
namespace {

namespace py = pybind11;

/// Owned by the module's life, which is that of the interpreter: never freed, so that no Python
/// object is released after the interpreter has gone.
std::map<std::string, py::object>& error_types() {
  static auto* const types = new std::map<std::string, py::object>;
  return *types;
}

const char* key_of(StatusCode code) {
  switch (code) {
    case StatusCode::kTimeout:
      return "timeout";
    case StatusCode::kPeerLost:
      return "peer_lost";
    case StatusCode::kLayoutMismatch:
      return "layout_mismatch";
    case StatusCode::kConfig:
      return "config";
    case StatusCode::kOk:
    case StatusCode::kNoSpace:
    case StatusCode::kBusy:
    case StatusCode::kClosed:
    case StatusCode::kInternal:
      return "error";
  }
  return "error";
}

}  // namespace

void bind_errors(py::module_& module) {
  module.def(
      "set_error_types",
      [](const std::map<std::string, py::object>& types) { error_types() = types; },
      py::arg("types"));
}

void throw_if_error(const Status& status) {
  if (status.ok()) return;
  // A handler of the user's (KeyboardInterrupt, say) has already set what is to be raised.
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  const auto found = error_types().find(key_of(status.code()));
  PyErr_SetString(found == error_types().end() ? PyExc_RuntimeError : found->second.ptr(),
                  status.message().c_str());
  throw py::error_already_set();
}

}  // namespace psplus::bindings
