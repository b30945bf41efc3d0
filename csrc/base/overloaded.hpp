#pragma once

namespace psplus {

/// Several lambdas as one visitor for `std::visit`.
template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

}  // namespace psplus
