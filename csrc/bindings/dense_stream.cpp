#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "bindings/gradient_push.hpp"
#include "bindings/tensors.hpp"

namespace py = pybind11;

namespace psplus::bindings {
namespace {

using worker::DenseStream;
using worker::Observation;
using Tensors = std::vector<at::Tensor>;

/// Runs `call` without the GIL and raises what its Status says.
template <class F>
void run(F call) {
  Status status;
  {
    const py::gil_scoped_release no_gil;
    status = call();
  }
  throw_if_error(status);
}

void add_extent(DenseStream& stream, const std::vector<Declared>& params,
                const std::optional<py::bytes>& blob, const Tensors& tensors,
                const std::vector<Tensors>& planes, const std::vector<std::uint64_t>& counts) {
  std::vector<store::ParamSpec> specs = to_specs(params);
  const ReadableTensors readable{tensors, specs};
  WritableTensors writable{tensors, specs};
  const GivenState state{planes, counts, specs};
  const auto blob_span = bytes_of(blob);
  run([&] {
    return stream.add_extent(std::move(specs), blob_span, readable.pointers(), writable.pointers(),
                             state.view());
  });
  writable.finish();
}

void publish_values(DenseStream& stream, const Tensors& params) {
  const ReadableTensors readable{params, stream.params()};
  run([&] { return stream.publish_values(readable.pointers()); });
}

bool wait_initialised(DenseStream& stream) {
  auto result = [&] {
    const py::gil_scoped_release no_gil;
    return stream.wait_initialised();
  }();
  return value_or_throw(std::move(result));
}

void snapshot(DenseStream& stream, const Tensors& params) {
  const ReadableTensors readable{params, stream.params()};
  const py::gil_scoped_release no_gil;
  stream.snapshot(readable.pointers());
}

std::int64_t write_delta(DenseStream& stream, const Tensors& params,
                         const std::vector<bool>& carried) {
  if (carried.size() != params.size())
    throw py::value_error("carried must have one entry a parameter");
  const ReadableTensors readable{params, stream.params()};
  const std::vector<std::uint8_t> flags(carried.begin(), carried.end());
  auto result = [&] {
    const py::gil_scoped_release no_gil;
    return stream.write_delta(readable.pointers(), flags);
  }();
  return value_or_throw(std::move(result));
}

std::int64_t push_sum(DenseStream& stream, const Tensors& values, double scale,
                      bool must_be_finite) {
  const ReadableTensors readable{values, stream.params()};
  auto result = [&] {
    const py::gil_scoped_release no_gil;
    return stream.push_sum(readable.pointers(), scale, must_be_finite);
  }();
  return value_or_throw(std::move(result));
}

void pull(DenseStream& stream, const Tensors& params, double local_scale) {
  WritableTensors writable{params, stream.params()};
  run([&] { return stream.pull(writable.pointers(), local_scale); });
  writable.finish();
}

Observation pull_cut(DenseStream& stream, const Tensors& params) {
  WritableTensors writable{params, stream.params()};
  run([&] { return stream.pull_cut(writable.pointers()); });
  writable.finish();
  return stream.observation();
}

Observation observe(DenseStream& stream) {
  run([&] { return stream.observe(); });
  return stream.observation();
}

std::optional<py::bytes> blob(const DenseStream& stream) {
  if (stream.provides() || stream.blob().empty()) return std::nullopt;
  return py::bytes{reinterpret_cast<const char*>(stream.blob().data()), stream.blob().size()};
}

void bind_observation(py::module_& module) {
  py::class_<Observation>(module, "Observation")
      .def_readonly("observed", &Observation::observed)
      .def_property_readonly(
          "actual",
          [](const Observation& o) { return o.actual ? static_cast<std::int64_t>(*o.actual) : -1; })
      .def_readonly("step", &Observation::step)
      .def_readonly("step_vector", &Observation::step_vector)
      .def_readonly("rates", &Observation::rates)
      .def_readonly("num_workers", &Observation::num_workers);
}

}  // namespace

void bind_dense_stream(py::module_& module) {
  bind_observation(module);
  py::class_<DenseStream> stream{module, "DenseStream"};
  bind_gradient_push(stream);
  stream.def_property_readonly("provides", &DenseStream::provides)
      .def_property_readonly("blob", &blob)
      .def_property_readonly("rejoined", &DenseStream::rejoined)
      .def_property_readonly("steps", &DenseStream::steps)
      .def_property_readonly("total_pushes", &DenseStream::total_pushes)
      .def_property_readonly("bytes_pushed",
                             [](const DenseStream& s) { return s.counters().bytes_pushed; })
      .def_property_readonly("bytes_pulled",
                             [](const DenseStream& s) { return s.counters().bytes_pulled; })
      .def_property_readonly("retries", [](const DenseStream& s) { return s.counters().retries; })
      .def_property_readonly("wait_seconds",
                             [](const DenseStream& s) { return to_seconds(s.counters().waited); })
      .def("add_extent", &add_extent, py::arg("params"), py::arg("blob"), py::arg("tensors"),
           py::kw_only(), py::arg("planes") = std::vector<Tensors>{},
           py::arg("counts") = std::vector<std::uint64_t>{})
      .def("publish_values", &publish_values, py::arg("params"))
      .def("wait_initialised", &wait_initialised)
      .def("begin_step", &DenseStream::begin_step)
      .def("snapshot", &snapshot, py::arg("params"))
      .def("write_delta", &write_delta, py::arg("params"), py::arg("carried"))
      .def("push_sum", &push_sum, py::arg("values"), py::arg("scale"), py::arg("must_be_finite"))
      .def("write_nothing", [](DenseStream& s) { run([&] { return s.write_nothing(); }); })
      .def(
          "first_overflow",
          [](const DenseStream& s, double scale) { return s.first_overflow(scale); },
          py::arg("scale"))
      .def(
          "publish", [](DenseStream& s, double lam) { run([&] { return s.publish(lam); }); },
          py::arg("lam"))
      .def(
          "wait_round",
          [](DenseStream& s, std::uint64_t lag) { run([&] { return s.wait_round(lag); }); },
          py::arg("lag"))
      .def("refresh", [](DenseStream& s) { run([&] { return s.refresh(); }); })
      .def("observe", &observe)
      .def("peek", &DenseStream::observation)
      .def("pull", &pull, py::arg("params"), py::arg("local_scale"))
      .def("pull_cut", &pull_cut, py::arg("params"))
      .def("arrive", &DenseStream::arrive)
      .def("barrier", [](DenseStream& s) { run([&] { return s.barrier(); }); })
      .def("step_vector", &DenseStream::step_vector)
      .def(
          "close",
          [](DenseStream& s, double timeout) {
            run([&] { return s.close(to_duration(timeout)); });
          },
          py::arg("timeout") = 5.0);
}

}  // namespace psplus::bindings
