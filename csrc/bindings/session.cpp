#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "base/format.hpp"
#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "bindings/tensors.hpp"

namespace py = pybind11;

namespace psplus::bindings {
namespace {

using worker::DenseStream;
using worker::Session;

/// Runs Python's signal handlers, so that Ctrl-C ends a wait. True when one of them raised.
bool interrupted() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

/// Through Python's logging, from whichever thread waits.
void warn(const std::string& text) {
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("logging").attr("getLogger")("psplus").attr("warning")("%s", text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a warning of psplus");
  }
}

std::shared_ptr<Session> connect(std::string job_dir, std::string server_path, std::uint32_t rank,
                                 std::uint32_t world_size, double timeout,
                                 double straggler_timeout) {
  worker::SessionOptions options;
  options.job_dir = std::move(job_dir);
  options.server_path = std::move(server_path);
  options.rank = Rank{rank};
  options.world_size = world_size;
  options.timeout = to_duration(timeout);
  options.straggler_timeout = to_duration(straggler_timeout);
  options.interrupted = interrupted;
  options.warn = warn;
  auto session = [&] {
    const py::gil_scoped_release no_gil;
    return Session::connect(std::move(options));
  }();
  return value_or_throw(std::move(session));
}

store::RuleKind to_rule(const std::optional<std::string>& name) {
  if (!name) return store::RuleKind::kNone;
  if (*name == "sgd") return store::RuleKind::kSgd;
  if (*name == "adam") return store::RuleKind::kAdam;
  if (*name == "adagrad") return store::RuleKind::kAdagrad;
  throw py::value_error(formatted("rule must be 'sgd', 'adam' or 'adagrad', got '{}'", *name));
}

std::unique_ptr<DenseStream> open_stream(
    const std::shared_ptr<Session>& session, std::uint16_t ordinal, const std::string& mode,
    std::optional<std::uint64_t> bound, bool buffered, const std::vector<Declared>& params,
    const std::optional<py::bytes>& blob, const std::optional<std::string>& rule,
    std::uint8_t planes, double timeout, double straggler_timeout, std::size_t chunk_bytes) {
  if (mode != "async" && mode != "bsp")
    throw py::value_error(formatted("mode must be 'async' or 'bsp', got '{}'", mode));
  if (ordinal >= store::kMaxStreams)
    throw_if_error(
        {StatusCode::kConfig,
         formatted("a job has {} wrappers at most; wrap fewer optimizers", store::kMaxStreams)});
  const worker::StreamOptions options{
      .stream = StreamId{ordinal},
      .mode = mode == "bsp" ? store::Mode::kBsp : store::Mode::kAsync,
      .pull = buffered ? store::PullMode::kBuffered : store::PullMode::kMapped,
      .bound = bound.value_or(store::kNoBound),
      .rule = {to_rule(rule), planes},
      .timeout = to_duration(timeout),
      .straggler_timeout = to_duration(straggler_timeout)};
  if (!options.rule.is_valid())
    throw py::value_error(formatted("rule {} has no {} planes", rule.value_or("None"), planes));
  store::ExtentLayout layout{to_specs(params), chunk_bytes};
  const auto blob_span = bytes_of(blob);
  auto stream = [&] {
    const py::gil_scoped_release no_gil;
    return DenseStream::open(session, options, std::move(layout), blob_span);
  }();
  return value_or_throw(std::move(stream));
}

std::uint32_t live_workers(const Session& session) {
  std::uint32_t count = 0;
  for (const store::MemberEntry& member : session.control().members)
    if (static_cast<store::MemberState>(member.state.load(std::memory_order_relaxed)) ==
        store::MemberState::kLive)
      ++count;
  return count;
}

}  // namespace

void bind_session(py::module_& module) {
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def(py::init(&connect), py::kw_only(), py::arg("job_dir"), py::arg("server_path"),
           py::arg("rank"), py::arg("world_size"), py::arg("timeout") = 60.0,
           py::arg("straggler_timeout") = 1800.0)
      .def_property_readonly("rank", [](const Session& s) { return raw(s.options().rank); })
      .def_property_readonly("world_size", [](const Session& s) { return s.options().world_size; })
      .def_property_readonly("num_workers", &live_workers)
      .def_property_readonly("server_pid",
                             [](const Session& s) {
                               return s.control().server_process.load(std::memory_order_relaxed);
                             })
      .def_property_readonly("server_restarts", &Session::server_restarts)
      .def("open_stream", &open_stream, py::kw_only(), py::arg("ordinal"), py::arg("mode"),
           py::arg("bound"), py::arg("buffered"), py::arg("params"), py::arg("blob"),
           py::arg("rule") = std::nullopt, py::arg("planes") = 0, py::arg("timeout") = 60.0,
           py::arg("straggler_timeout") = 1800.0, py::arg("chunk_bytes") = store::kChunkBytes)
      .def(
          "close",
          [](Session& session, double timeout) {
            Status status;
            {
              const py::gil_scoped_release no_gil;
              status = session.close(to_duration(timeout));
            }
            throw_if_error(status);
          },
          py::arg("timeout") = 5.0);
}

}  // namespace psplus::bindings
