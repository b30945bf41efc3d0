#include "c10d/work.hpp"

#include <utility>

#include "base/format.hpp"

namespace psplus::pg {

void throw_if_forked(pid_t owner, int rank) {
  const pid_t here = this_process();
  if (here == owner) [[likely]]
    return;
  C10_THROW_ERROR(
      DistBackendError,
      formatted("psplus: process {} was forked from rank {} (process {}) and has no place in its "
                "process group; start it with the method 'spawn', or call "
                "destroy_process_group() and init_process_group() in it",
                here, rank, owner));
}

void GroupWork::run() noexcept {
  std::exception_ptr error;
  try {
    // Inputs and outputs are handled as plain memory: no autograd graph, no version check.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Status status = body_(Deadline::after(timeout_));
    if (!status.ok()) error = to_exception(status);
  } catch (...) {
    error = std::current_exception();
  }
  body_ = nullptr;  // lets go of the inputs
  end(std::move(error));
}

void GroupWork::end(std::exception_ptr error) noexcept { finish(std::move(error)); }

void GroupWork::complete(std::exception_ptr error) noexcept {
  end(std::move(error));
  settle();
}

bool GroupWork::has_future() {
  const std::lock_guard lock{mutex_};
  return future_ != nullptr;
}

void GroupWork::settle() {
  {
    // Whoever ended the work and getFuture() may both have seen the other's half.
    const std::lock_guard lock{mutex_};
    if (!future_ || std::exchange(settled_, true)) return;
  }
  if (const std::exception_ptr error = exception())
    future_->setErrorIfNeeded(error);
  else
    future_->markCompleted(c10::IValue(outputs_));
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  throw_if_forked(process_, rank_);
  if (helper_ && !isCompleted()) helper_();
  return Work::wait(timeout);
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  throw_if_forked(process_, rank_);
  bool completed = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock{mutex_};
    if (future_) return future_;
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future = future_;
    // Whoever ends the work finds the future from here on; what has ended before is settled here.
    completed = completed_;
  }
  if (completed) settle();
  return future;
}

bool CoalescedWork::isCompleted() {
  for (const auto& work : works_)
    if (!work->isCompleted()) return false;
  return true;
}

bool CoalescedWork::isSuccess() const {
  for (const auto& work : works_)
    if (!work->isSuccess()) return false;
  return true;
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_)
    if (const std::exception_ptr error = work->exception()) return error;
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  bool all = true;
  for (const auto& work : works_) all = work->wait(timeout) && all;
  return all;
}

void CoalescedWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_)
    for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures{
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get()))};
  for (const auto& work : works_) futures.push_back(work->getFuture());
  const auto tensors = c10::ListType::create(c10::TensorType::get());
  return c10::collectAll(futures)->then(
      [works = works_](c10::ivalue::Future&) {
        std::vector<at::Tensor> all;
        for (const auto& work : works)
          for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
        return c10::IValue(all);
      },
      tensors);
}

}  // namespace psplus::pg
