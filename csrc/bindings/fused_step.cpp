#include "bindings/fused_step.hpp"

#include <torch/csrc/utils/pybind.h>

#include <ATen/ATen.h>

#include "base/overloaded.hpp"
#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "bindings/tensors.hpp"

namespace py = pybind11;

namespace psplus::bindings {
namespace {

bool is_plain_on_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
         is_plain(tensor);
}

bool has_kernel(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16;
}

bool fits(const at::Tensor& tensor, const at::Tensor& param) {
  return is_plain_on_cpu(tensor) && tensor.scalar_type() == param.scalar_type() &&
         tensor.sizes() == param.sizes();
}

bool is_counter(const at::Tensor& step) {
  return is_plain_on_cpu(step) && step.numel() == 1 &&
         (step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble);
}

/// Raises a step counter by one. @return what it counts then.
double count(const at::Tensor& step) {
  step.unsafeGetTensorImpl()->bump_version();
  if (step.scalar_type() == at::kFloat) return *step.mutable_data_ptr<float>() += 1;
  return *step.mutable_data_ptr<double>() += 1;
}

}  // namespace

std::unique_ptr<FusedStep> FusedStep::prepare(const std::vector<at::Tensor>& params,
                                              std::vector<StepGroup> groups) {
  std::unique_ptr<FusedStep> step{new FusedStep};
  step->params_ = params;
  step->groups_ = std::move(groups);
  step->fused_.resize(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!is_plain_on_cpu(params[i]) || !has_kernel(params[i].scalar_type())) return nullptr;
    step->fused_[i].value = params[i].mutable_data_ptr();
  }
  for (StepGroup& group : step->groups_)
    for (std::size_t k = 0; k < group.indices.size(); ++k)
      if (!step->add(params.at(static_cast<std::size_t>(group.indices[k])), group, k))
        return nullptr;
  return step;
}

bool FusedStep::add(const at::Tensor& param, StepGroup& group, std::size_t k) {
  worker::FusedParam& fused = fused_[static_cast<std::size_t>(group.indices[k])];
  if (!fits(group.gradients.at(k), param)) return false;
  fused.gradient = group.gradients[k].const_data_ptr();
  bool first = false;
  for (std::size_t s = 0; s < group.states.size(); ++s) {
    std::optional<at::Tensor>& state = group.states[s].at(k);
    if (!state) {
      first = true;
      state = at::empty(param.sizes(), param.options().requires_grad(false));
      made_.emplace_back(group.indices[k], *state);
    }
    if (!fits(*state, param)) return false;
    fused.states[s] = state->mutable_data_ptr();
  }
  if (!group.steps.empty() && !is_counter(group.steps.at(k))) return false;
  if (const auto* const sgd = std::get_if<kernels::SgdOptions>(&group.options))
    fused.rule = make_rule(*sgd, first);
  return true;
}

Result<std::int64_t> FusedStep::run(worker::DenseStream& stream,
                                    std::optional<double> local_scale) {
  check_tensors(params_, stream.params());
  if (Status status = stream.wait_for_slot(); !status.ok()) return status;
  for (StepGroup& group : groups_) {
    if (group.steps.empty()) continue;
    for (std::size_t k = 0; k < group.indices.size(); ++k) {
      const double t = count(group.steps[k]);
      fused_[static_cast<std::size_t>(group.indices[k])].rule =
          std::visit(Overloaded{
                         [](const kernels::SgdOptions& sgd) { return make_rule(sgd, false); },
                         [t](const auto& options) { return make_rule(options, t); },
                     },
                     group.options);
    }
  }
  auto result = stream.fused_step(fused_, local_scale);
  if (local_scale)
    for (const at::Tensor& param : params_) param.unsafeGetTensorImpl()->bump_version();
  for (const StepGroup& group : groups_)
    for (const auto& column : group.states)
      for (const auto& state : column) state->unsafeGetTensorImpl()->bump_version();
  return result;
}

void bind_fused_step(py::module_& module) {
  using kernels::AdagradOptions;
  using kernels::AdamOptions;
  using kernels::SgdOptions;
  py::class_<SgdOptions>(module, "SgdOptions")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay,
                       bool nesterov, bool maximize) {
             return SgdOptions{lr, momentum, dampening, weight_decay, nesterov, maximize};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
           py::arg("weight_decay"), py::arg("nesterov"), py::arg("maximize"));
  py::class_<AdamOptions>(module, "AdamOptions")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool decoupled, bool amsgrad, bool maximize) {
             return AdamOptions{lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("decoupled"), py::arg("amsgrad"), py::arg("maximize"));
  py::class_<AdagradOptions>(module, "AdagradOptions")
      .def(py::init([](double lr, double lr_decay, double eps, double weight_decay, bool maximize) {
             return AdagradOptions{lr, lr_decay, eps, weight_decay, maximize};
           }),
           py::kw_only(), py::arg("lr"), py::arg("lr_decay"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("maximize"));
  py::class_<StepGroup>(module, "StepGroup")
      .def(py::init([](StepOptions options, std::vector<std::int64_t> indices,
                       std::vector<at::Tensor> gradients,
                       std::vector<std::vector<std::optional<at::Tensor>>> states,
                       std::vector<at::Tensor> steps) {
             return StepGroup{std::move(options), std::move(indices), std::move(gradients),
                              std::move(states), std::move(steps)};
           }),
           py::kw_only(), py::arg("options"), py::arg("indices"), py::arg("gradients"),
           py::arg("states"), py::arg("steps"));
  py::class_<FusedStep>(module, "FusedStep")
      .def_static("prepare", &FusedStep::prepare, py::arg("params"), py::arg("groups"))
      .def_property_readonly("made", &FusedStep::made)
      .def(
          "run",
          [](FusedStep& step, worker::DenseStream& stream, std::optional<double> local_scale) {
            auto result = [&] {
              const py::gil_scoped_release no_gil;
              return step.run(stream, local_scale);
            }();
            return value_or_throw(std::move(result));
          },
          py::arg("stream"), py::arg("local_scale"));
}

}  // namespace psplus::bindings
