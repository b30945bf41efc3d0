#include "c10d/staged_reduction.hpp"

#include "c10d/buffers.hpp"

namespace psplus::pg {

using collectives::Element;
using collectives::Reduction;

namespace {

bool is_integer(Element element) {
  return element != Element::boolean && element < Element::float16;
}

bool is_half(Element element) {
  return element == Element::float16 || element == Element::bfloat16;
}

}  // namespace

StagedReduction::StagedReduction(const collectives::ReduceSpec& spec, std::size_t ranks)
    : within_(spec) {
  if (spec.reduction != Reduction::avg) return;
  if (is_half(spec.element)) {
    within_.reduction = Reduction::premul_sum;
    within_.factor = 1.0 / static_cast<double>(ranks);
    return;
  }
  within_.reduction = Reduction::sum;
  divisor_ = static_cast<std::int64_t>(ranks);
  widen_ = is_integer(spec.element);
  if (widen_) within_.element = Element::int64;
}

at::Tensor StagedReduction::input(const at::Tensor& tensor) const {
  const at::Tensor plain = Buffer::of(tensor).plain();
  return widen_ ? plain.to(at::kLong) : plain;
}

void StagedReduction::finish(at::Tensor reduced, const at::Tensor& out) const {
  if (widen_)
    reduced = at::div(reduced, divisor_, "trunc");
  else if (divisor_ != 1)
    reduced.div_(divisor_);
  if (!reduced.is_same(out)) at::Tensor{out}.copy_(reduced);
}

}  // namespace psplus::pg
