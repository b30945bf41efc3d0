#include "bindings/gradient_watch.hpp"

#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <optional>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "bindings/bindings.hpp"
#include "bindings/tensors.hpp"
#include "kernels/kernels.hpp"

namespace py = pybind11;

namespace psplus::bindings {
namespace {

namespace autograd = torch::autograd;
using Accumulator = decltype(autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

bool has_dtype(const at::Tensor& gradient) {
  switch (gradient.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

bool is_readable(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.device().is_cpu() && has_dtype(gradient);
}

/// Any order of elements will do, so memory without gaps need not be contiguous.
bool is_finite(const at::Tensor& gradient) {
  const bool in_place = gradient.is_non_overlapping_and_dense();
  const at::Tensor dense = in_place ? gradient.detach() : gradient.detach().contiguous();
  const DType dtype = to_dtype(dense.scalar_type());
  const auto scalars = static_cast<std::size_t>(dense.numel()) * scalars_per_element(dtype);
  return kernels::best().all_finite(dtype, dense.const_data_ptr(), scalars);
}

}  // namespace

/// What the last look at one parameter's gradient found. The weak reference keeps the tensor's
/// address from being used again, not its memory.
struct GradientWatch::Seen {
  Accumulator accumulator;
  std::uintptr_t hook = 0;
  c10::weak_intrusive_ptr<c10::TensorImpl> gradient{c10::intrusive_ptr<c10::TensorImpl>{}};
  std::uint32_t version = 0;
  bool finite = true;

  [[nodiscard]] bool is_of(const at::Tensor& now) const {
    return gradient._unsafe_get_target() == now.unsafeGetTensorImpl() && version == now._version();
  }
  void look(const at::Tensor& now) {
    finite = is_finite(now);
    gradient = c10::weak_intrusive_ptr<c10::TensorImpl>{now.getIntrusivePtr()};
    version = static_cast<std::uint32_t>(now._version());
  }
};

/// Runs behind the node that accumulates one parameter's gradient.
class GradientWatch::Hook : public autograd::FunctionPostHook {
 public:
  Hook(std::weak_ptr<Seen> seen, c10::weak_intrusive_ptr<c10::TensorImpl> param)
      : seen_(std::move(seen)), param_(std::move(param)) {}

  autograd::variable_list operator()(const autograd::variable_list& outputs,
                                     const autograd::variable_list& /*inputs*/) override {
    const auto seen = seen_.lock();
    const auto param = param_.lock();
    if (seen == nullptr || !param) return outputs;
    const at::Tensor gradient = at::Tensor{param}.grad();
    if (gradient.defined() && is_readable(gradient)) seen->look(gradient);
    return outputs;
  }

  /// Compiled autograd traces its own graph without this hook; the gradient is looked at later.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  std::weak_ptr<Seen> seen_;
  c10::weak_intrusive_ptr<c10::TensorImpl> param_;
};

GradientWatch::GradientWatch(std::vector<at::Tensor> params) : params_(std::move(params)) {
  for (const at::Tensor& param : params_) {
    auto seen = std::make_shared<Seen>();
    if (param.requires_grad() && param.is_leaf()) {
      seen->accumulator = autograd::impl::grad_accumulator(param);
      seen->hook = seen->accumulator->add_post_hook(std::make_unique<Hook>(
          seen, c10::weak_intrusive_ptr<c10::TensorImpl>{param.getIntrusivePtr()}));
    }
    seen_.push_back(std::move(seen));
  }
}

GradientWatch::~GradientWatch() { stop(); }

void GradientWatch::stop() noexcept {
  for (const auto& seen : seen_)
    if (seen->accumulator) seen->accumulator->del_post_hook(seen->hook);
  seen_.clear();
  params_.clear();
}

std::int64_t GradientWatch::first_nonfinite() {
  std::int64_t first = -1;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& gradient = params_[i].grad();
    if (!gradient.defined()) continue;
    if (!is_readable(gradient)) return -2;
    // What was bad may have been mended through `.data`, which moves no version counter.
    if (!seen_[i]->is_of(gradient) || !seen_[i]->finite) seen_[i]->look(gradient);
    if (!seen_[i]->finite && first < 0) first = static_cast<std::int64_t>(i);
  }
  return first;
}

void bind_gradient_watch(py::module_& module) {
  py::class_<GradientWatch>(module, "GradientWatch")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("params"))
      .def("first_nonfinite", &GradientWatch::first_nonfinite,
           py::call_guard<py::gil_scoped_release>())
      .def("stop", &GradientWatch::stop);
}

}  // namespace psplus::bindings
