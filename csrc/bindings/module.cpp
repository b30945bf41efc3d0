#include <torch/csrc/utils/pybind.h>

#include <string>

#include "bindings/bindings.hpp"
#include "bindings/errors.hpp"
#include "kernels/kernels.hpp"

PYBIND11_MODULE(_C, module) {
  using namespace psplus;
  module.doc() = "Native half of psplus: sessions, dense streams, kernels.";
  bindings::bind_errors(module);
  bindings::bind_session(module);
  bindings::bind_dense_stream(module);
  bindings::bind_fused_step(module);
  bindings::bind_gradient_watch(module);
  bindings::bind_process_group(module);
  module.def("kernel_isa", [] { return std::string{kernels::name(kernels::best_isa())}; });
}
