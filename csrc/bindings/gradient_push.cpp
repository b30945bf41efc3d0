#include "bindings/gradient_push.hpp"

#include <stdexcept>
#include <utility>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/overloaded.hpp"
#include "bindings/errors.hpp"
#include "bindings/fused_step.hpp"

namespace py = pybind11;

namespace psplus::bindings {
namespace {

using worker::DenseStream;
using Tensors = std::vector<at::Tensor>;

store::StepOptions to_slot(const StepOptions& options) {
  const auto flag = [](bool set, std::uint32_t bit) { return set ? bit : 0; };
  return std::visit(
      Overloaded{[&](const kernels::SgdOptions& o) {
                   return store::StepOptions{.kind = raw(store::RuleKind::kSgd),
                                             .flags = flag(o.nesterov, store::kStepNesterov) |
                                                      flag(o.maximize, store::kStepMaximize),
                                             .lr = o.lr,
                                             .momentum = o.momentum,
                                             .dampening = o.dampening,
                                             .weight_decay = o.weight_decay};
                 },
                 [&](const kernels::AdamOptions& o) {
                   return store::StepOptions{.kind = raw(store::RuleKind::kAdam),
                                             .flags = flag(o.decoupled, store::kStepDecoupled) |
                                                      flag(o.amsgrad, store::kStepAmsgrad) |
                                                      flag(o.maximize, store::kStepMaximize),
                                             .lr = o.lr,
                                             .weight_decay = o.weight_decay,
                                             .beta1 = o.beta1,
                                             .beta2 = o.beta2,
                                             .eps = o.eps};
                 },
                 [&](const kernels::AdagradOptions& o) {
                   return store::StepOptions{.kind = raw(store::RuleKind::kAdagrad),
                                             .flags = flag(o.maximize, store::kStepMaximize),
                                             .lr = o.lr,
                                             .weight_decay = o.weight_decay,
                                             .eps = o.eps,
                                             .lr_decay = o.lr_decay};
                 }},
      options);
}

std::int64_t write_gradients(DenseStream& stream, const Tensors& gradients,
                             const std::vector<bool>& carried,
                             const std::vector<StepOptions>& options,
                             const std::vector<std::size_t>& groups) {
  const ReadableTensors readable{gradients, stream.params()};
  if (carried.size() != gradients.size() || groups.size() != gradients.size())
    throw py::value_error("carried and groups must have one entry a parameter");
  std::vector<const void*> pointers(readable.pointers().begin(), readable.pointers().end());
  std::vector<store::StepOptions> in_slot(gradients.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (carried[i])
      in_slot[i] = to_slot(options.at(groups[i]));
    else
      pointers[i] = nullptr;
  }
  auto result = [&] {
    const py::gil_scoped_release no_gil;
    return stream.write_gradients(pointers, in_slot);
  }();
  return value_or_throw(std::move(result));
}

void publish_plane(DenseStream& stream, std::uint32_t plane, const Tensors& params,
                   const std::vector<std::uint64_t>& counts) {
  const ReadableTensors readable{params, stream.params()};
  if (counts.size() != params.size())
    throw py::value_error("counts must have one entry a parameter");
  Status status;
  {
    const py::gil_scoped_release no_gil;
    status = stream.publish_plane(plane, readable.pointers(), counts);
  }
  throw_if_error(status);
}

std::vector<std::uint64_t> read_state(DenseStream& stream, const std::vector<Tensors>& planes) {
  std::vector<WritableTensors> writable;
  std::vector<std::span<void* const>> pointers;
  for (const Tensors& plane : planes) writable.emplace_back(plane, stream.params());
  for (const WritableTensors& plane : writable) pointers.push_back(plane.pointers());
  std::vector<std::uint64_t> counts(stream.params().size());
  Status status;
  {
    const py::gil_scoped_release no_gil;
    status = stream.read_state(pointers, counts);
  }
  throw_if_error(status);
  for (WritableTensors& plane : writable) plane.finish();
  return counts;
}

}  // namespace

GivenState::GivenState(const std::vector<std::vector<at::Tensor>>& planes,
                       std::vector<std::uint64_t> counts, Specs params)
    : counts_(std::move(counts)) {
  if (!planes.empty() && counts_.size() != params.size())
    throw std::invalid_argument("counts must have one entry a parameter");
  for (const auto& plane : planes) {
    const auto pointers = kept_.emplace_back(plane, params).pointers();
    planes_.emplace_back(pointers.begin(), pointers.end());
  }
}

void bind_gradient_push(py::class_<DenseStream>& stream) {
  stream.def_property_readonly("was_outvoted", &DenseStream::was_outvoted)
      .def("write_gradients", &write_gradients, py::arg("gradients"), py::arg("carried"),
           py::arg("options"), py::arg("groups"))
      .def("publish_plane", &publish_plane, py::arg("plane"), py::arg("params"), py::arg("counts"))
      .def("read_state", &read_state, py::arg("planes"));
}

}  // namespace psplus::bindings
