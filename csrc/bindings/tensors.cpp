#include "bindings/tensors.hpp"

#include "base/format.hpp"

#include <stdexcept>

#include <ATen/ATen.h>

namespace psplus::bindings {
namespace {

DType parse_dtype(const std::string& text, const std::string& parameter) {
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16,
                            DType::complex64, DType::complex128})
    if (name(dtype) == text) return dtype;
  throw std::invalid_argument(
      formatted("parameter '{}' has dtype {}, which is not supported", parameter, text));
}

}  // namespace

std::vector<store::ParamSpec> to_specs(const std::vector<Declared>& params) {
  std::vector<store::ParamSpec> specs;
  for (const auto& [param, dtype, shape] : params)
    specs.push_back({param, parse_dtype(dtype, param), shape});
  return specs;
}

void check_tensors(const std::vector<at::Tensor>& tensors, Specs params) {
  if (tensors.size() != params.size())
    throw std::invalid_argument(
        formatted("expected {} tensors, got {}", params.size(), tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const store::ParamSpec& param = params[i];
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu())
      throw std::invalid_argument(
          formatted("parameter '{}' must be a dense CPU tensor", param.name));
    const auto sizes = tensor.sizes();
    if (to_dtype(tensor.scalar_type()) != param.dtype ||
        !std::equal(sizes.begin(), sizes.end(), param.shape.begin(), param.shape.end()))
      throw std::invalid_argument(formatted(
          "parameter '{}' was registered as {} of shape [{}], but now is {} of shape [{}]; a "
          "parameter keeps its shape and dtype while it is wrapped",
          param.name, name(param.dtype), joined(param.shape, ", "),
          name(to_dtype(tensor.scalar_type())), joined(sizes, ", ")));
  }
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

DType to_dtype(at::ScalarType type) {
  if (type == at::kFloat) return DType::float32;
  if (type == at::kDouble) return DType::float64;
  if (type == at::kBFloat16) return DType::bfloat16;
  if (type == at::kHalf) return DType::float16;
  if (type == at::kComplexFloat) return DType::complex64;
  if (type == at::kComplexDouble) return DType::complex128;
  throw std::invalid_argument(formatted("dtype {} is not supported", c10::toString(type)));
}

ReadableTensors::ReadableTensors(const std::vector<at::Tensor>& tensors, Specs params) {
  check_tensors(tensors, params);
  for (const at::Tensor& tensor : tensors) {
    kept_.push_back(is_plain(tensor) ? tensor.detach()
                                     : tensor.detach().resolve_conj().resolve_neg().contiguous());
    pointers_.push_back(kept_.back().const_data_ptr());
  }
}

WritableTensors::WritableTensors(const std::vector<at::Tensor>& tensors, Specs params)
    : tensors_(tensors) {
  check_tensors(tensors, params);
  for (const at::Tensor& tensor : tensors_) {
    contiguous_.push_back(
        is_plain(tensor) ? tensor.detach()
                         : at::empty(tensor.sizes(),
                                     tensor.options().memory_format(at::MemoryFormat::Contiguous)));
    pointers_.push_back(contiguous_.back().mutable_data_ptr());
  }
}

void WritableTensors::finish() {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!is_plain(tensors_[i]))
      tensors_[i].detach().copy_(contiguous_[i]);  // shares the version counter, and bumps it
    else
      tensors_[i].unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace psplus::bindings
