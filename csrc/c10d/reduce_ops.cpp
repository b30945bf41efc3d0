#include "c10d/reduce_ops.hpp"

#include <stdexcept>

namespace psplus::pg {

using collectives::Element;
using collectives::Reduction;

Element to_element(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return Element::uint8;
    case at::kChar:
      return Element::int8;
    case at::kUInt16:
      return Element::uint16;
    case at::kShort:
      return Element::int16;
    case at::kUInt32:
      return Element::uint32;
    case at::kInt:
      return Element::int32;
    case at::kUInt64:
      return Element::uint64;
    case at::kLong:
      return Element::int64;
    case at::kHalf:
      return Element::float16;
    case at::kBFloat16:
      return Element::bfloat16;
    case at::kFloat:
      return Element::float32;
    case at::kDouble:
      return Element::float64;
    case at::kBool:
      return Element::boolean;
    case at::kComplexFloat:
      return Element::complex64;
    case at::kComplexDouble:
      return Element::complex128;
    default:  // torch's enumeration, which grows
      TORCH_CHECK_VALUE(false, "psplus cannot reduce tensors of dtype ", c10::toString(type));
  }
}

namespace {

Reduction to_reduction(c10d::ReduceOp::RedOpType type) {
  switch (type) {
    case c10d::ReduceOp::SUM:
      return Reduction::sum;
    case c10d::ReduceOp::AVG:
      return Reduction::avg;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::product;
    case c10d::ReduceOp::MIN:
      return Reduction::min;
    case c10d::ReduceOp::MAX:
      return Reduction::max;
    case c10d::ReduceOp::BAND:
      return Reduction::band;
    case c10d::ReduceOp::BOR:
      return Reduction::bor;
    case c10d::ReduceOp::BXOR:
      return Reduction::bxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return Reduction::premul_sum;
    case c10d::ReduceOp::UNUSED:
      break;
  }
  TORCH_CHECK_VALUE(false, "psplus: unknown ReduceOp ", static_cast<int>(type));
}

double factor_of(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "psplus: ReduceOp.PREMUL_SUM without a factor");
  if (supplement->tensor_factor.defined()) return supplement->tensor_factor.item<double>();
  return supplement->double_factor;
}

}  // namespace

collectives::ReduceSpec to_spec(const c10d::ReduceOp& op, at::ScalarType type) {
  collectives::ReduceSpec spec{.element = to_element(type), .reduction = to_reduction(op.op_)};
  if (spec.reduction == Reduction::premul_sum) spec.factor = factor_of(op);
  try {
    (void)collectives::reduce_function(spec.element, spec.reduction);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "psplus: ", error.what());
  }
  return spec;
}

}  // namespace psplus::pg
