#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "bindings/tensors.hpp"
#include "kernels/kernels.hpp"

namespace py = pybind11;

namespace psplus::bindings {
namespace {

/// Index of the first dense CPU tensor that holds a NaN or an infinity, -1 if none does.
std::int64_t first_not_finite(const std::vector<at::Tensor>& tensors) {
  const py::gil_scoped_release no_gil;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor tensor = tensors[i].detach().contiguous();
    const DType dtype = to_dtype(tensor.scalar_type());
    const auto scalars = static_cast<std::size_t>(tensor.numel()) * scalars_per_element(dtype);
    if (!kernels::best().all_finite(dtype, tensor.const_data_ptr(), scalars))
      return static_cast<std::int64_t>(i);
  }
  return -1;
}

}  // namespace
}  // namespace psplus::bindings

PYBIND11_MODULE(_C, module) {
  using namespace psplus;
  module.doc() = "Native half of psplus: sessions, dense streams, kernels.";
  bindings::bind_errors(module);
  bindings::bind_session(module);
  bindings::bind_dense_stream(module);
  bindings::bind_process_group(module);
  module.def("kernel_isa", [] { return std::string{kernels::name(kernels::best_isa())}; });
  module.def("all_finite", &bindings::first_not_finite, py::arg("tensors"));
}
