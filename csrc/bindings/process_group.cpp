// Python's view of the process group, for psplus/distributed alone.

#include "c10d/process_group.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.hpp"

namespace psplus::bindings {
namespace {

namespace py = pybind11;
using pg::ProcessGroupPSPlus;

/// Lets go of a process group without the GIL: its threads are joined then, and one of them may be
/// waiting for the GIL in a Python callback.
template <class T>
class NoGilHolder {
 public:
  NoGilHolder() = default;
  explicit NoGilHolder(T* owned) : held_(c10::intrusive_ptr<T>::unsafe_steal_from_new(owned)) {}
  NoGilHolder(c10::intrusive_ptr<T> held) : held_(std::move(held)) {}  // NOLINT: a holder converts
  NoGilHolder(const NoGilHolder&) = default;
  NoGilHolder(NoGilHolder&&) = default;
  NoGilHolder& operator=(const NoGilHolder&) = default;
  NoGilHolder& operator=(NoGilHolder&&) = default;
  ~NoGilHolder() {
    if (!held_) return;
    if (PyGILState_Check() != 0) {
      const py::gil_scoped_release no_gil;
      held_.reset();
    } else {
      held_.reset();
    }
  }
  T* get() const noexcept { return held_.get(); }
  T& operator*() const noexcept { return *held_; }
  T* operator->() const noexcept { return held_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(held_); }

 private:
  c10::intrusive_ptr<T> held_;
};

/// A Python factory (store, rank, size, timeout, global_ranks) as a function that takes the GIL
/// itself. None gives a null backend.
ProcessGroupPSPlus::MakeBackend to_factory(py::object factory) {
  const std::shared_ptr<py::object> held{new py::object{std::move(factory)},
                                         [](py::object* object) {
                                           const py::gil_scoped_acquire gil;
                                           delete object;
                                         }};
  return [held](const ProcessGroupPSPlus::Setup& setup) -> ProcessGroupPSPlus::BackendPtr {
    const py::gil_scoped_acquire gil;
    const py::object made =
        (*held)(setup.store, setup.rank, setup.size, setup.timeout, setup.global_ranks);
    if (made.is_none()) return {};
    return made.cast<ProcessGroupPSPlus::BackendPtr>();
  };
}

c10::intrusive_ptr<ProcessGroupPSPlus> make_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout,
                                                  std::string host_id,
                                                  std::vector<std::uint64_t> global_ranks,
                                                  py::object make_gloo, py::object make_nccl) {
  ProcessGroupPSPlus::Setup setup{.store = store,
                                  .rank = rank,
                                  .size = size,
                                  .timeout = timeout,
                                  .host_id = std::move(host_id),
                                  .global_ranks = std::move(global_ranks),
                                  .make_gloo = to_factory(std::move(make_gloo)),
                                  .make_nccl = to_factory(std::move(make_nccl))};
  const py::gil_scoped_release no_gil;  // waits for the other ranks
  return c10::make_intrusive<ProcessGroupPSPlus>(std::move(setup));
}

}  // namespace
}  // namespace psplus::bindings

PYBIND11_DECLARE_HOLDER_TYPE(T, psplus::bindings::NoGilHolder<T>, true)

namespace psplus::bindings {

void bind_process_group(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");  // Backend and Store are bound there
  module.def(
      "await_callbacks",
      [](double seconds) {
        const py::gil_scoped_release no_gil;
        pg::await_callbacks(Deadline::after(
            std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(seconds))));
      },
      py::arg("seconds"));
  py::class_<ProcessGroupPSPlus, c10d::Backend, NoGilHolder<ProcessGroupPSPlus>>(
      module, "ProcessGroupPSPlus")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, std::string host_id,
                       std::vector<std::uint64_t> global_ranks, py::object make_gloo,
                       py::object make_nccl) {
             return NoGilHolder<ProcessGroupPSPlus>{
                 make_group(store, rank, size, timeout, std::move(host_id), std::move(global_ranks),
                            std::move(make_gloo), std::move(make_nccl))};
           }),
           py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("host_id"), py::arg("global_ranks"), py::arg("make_gloo"), py::arg("make_nccl"))
      .def_property_readonly("options", &ProcessGroupPSPlus::getBackendOptions)
      .def_property_readonly("shares_memory", &ProcessGroupPSPlus::shares_memory);
}

}  // namespace psplus::bindings
