// Life cycle, submission, coalescing, sends and receives.

#include "c10d/process_group.hpp"

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "c10d/rendezvous.hpp"

namespace psplus::pg {
namespace {

using c10d::OpType;

constexpr std::chrono::seconds kPatienceAtShutdown{5};

template <class T>
T value_or_throw(Result<T> result) {
  throw_if_failed(result.status());
  return std::move(result).value();
}

const at::Tensor& message_tensor(const std::vector<at::Tensor>& tensors, const char* call) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "psplus ", call, " takes one tensor, got ",
                    tensors.size());
  return tensors.front();
}

}  // namespace

ProcessGroupPSPlus::ProcessGroupPSPlus(Setup setup)
    : Backend(setup.rank, setup.size),
      options_(c10::make_intrusive<Options>("psplus", setup.timeout)),
      owner_(this_process()),
      setup_(std::move(setup)),
      timeout_(setup_.timeout) {
  options_->global_ranks_in_group = setup_.global_ranks;
  auto joined = value_or_throw(join_host(*setup_.store, setup_.rank, setup_.size, setup_.host_id,
                                         Deadline::after(setup_.timeout)));
  if (joined)
    host_ = std::make_shared<Host>(std::move(joined));
  else
    join_hosts();
  init();
}

void ProcessGroupPSPlus::join_hosts() {
  gloo_ = setup_.make_gloo(setup_);
  const auto make_another = [this](const c10::intrusive_ptr<c10d::Store>& store) {
    Setup another = setup_;
    another.store = store;
    return setup_.make_gloo(another);
  };
  hosts_ = value_or_throw(Hosts::meet(setup_.store, setup_.rank, setup_.size, setup_.host_id,
                                      make_another, Deadline::after(setup_.timeout)));
}

ProcessGroupPSPlus::~ProcessGroupPSPlus() {
  if (this_process() != owner_) {
    drop_in_child();
    return;
  }
  try {
    shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("psplus: a process group did not shut down cleanly: ", error.what());
  }
}

/// The threads that hold locks or sleep on condition variables are the parent's, so whatever has
/// such a member is left undestroyed; only the mapping and the descriptors go.
void ProcessGroupPSPlus::drop_in_child() noexcept {
  (void)new std::shared_ptr<Executor>{executor_};
  if (host_) {
    host_->group->forget();
    (void)new std::shared_ptr<Host>{std::move(host_)};
  }
  if (hosts_) {
    hosts_->forget();
    (void)new std::shared_ptr<Hosts>{std::move(hosts_)};
  }
  (void)gloo_.release();
  (void)nccl_.release();
}

void ProcessGroupPSPlus::setTimeout(std::chrono::milliseconds timeout) {
  check_process();
  const std::lock_guard lock{mutex_};
  timeout_ = options_->timeout = timeout;
  if (gloo_) gloo_->setTimeout(timeout);
  if (nccl_) nccl_->setTimeout(timeout);
}

milliseconds ProcessGroupPSPlus::timeout_or_default(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
}

c10d::Backend& ProcessGroupPSPlus::nccl() {
  const std::lock_guard lock{mutex_};
  if (!nccl_) {
    nccl_ = setup_.make_nccl(setup_);
    TORCH_CHECK(nccl_, "psplus: CUDA tensors need a torch with NCCL");
  }
  return *nccl_;
}

c10d::Backend* ProcessGroupPSPlus::inner_for(const at::Device& device) {
  check_process();
  if (device.is_cpu()) return hosts_ ? nullptr : gloo_.get();
  TORCH_CHECK_VALUE(device.is_cuda(), "psplus handles tensors on the CPU and on CUDA devices, not ",
                    device);
  c10d::Backend& inner = nccl();
  const std::lock_guard lock{mutex_};
  // Whoever starts to coalesce does not say for which device.
  if (coalescing_ && !std::exchange(coalescing_nccl_, true)) inner.startCoalescing();
  return &inner;
}

c10d::Backend* ProcessGroupPSPlus::inner_for_messages(const at::Device& device) {
  check_process();
  return device.is_cpu() ? gloo_.get() : inner_for(device);
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::note(WorkPtr work) {
  const std::lock_guard lock{mutex_};
  if (coalescing_ && !coalescing_nccl_) coalesced_.push_back(work);
  return work;
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::submit(Submission submission, const Tensors& inputs,
                                                       GroupWork::Body body) {
  for (const Tensors* tensors : {&inputs, &std::as_const(submission.outputs)})
    for (const at::Tensor& tensor : *tensors)
      TORCH_CHECK_VALUE(tensor.device().is_cpu(), submission.title,
                        ": all tensors of a call must be on the same device");
  std::unique_lock lock{mutex_};
  const auto work =
      c10::make_intrusive<GroupWork>(getRank(), submission.type, submission.title, ++sequence_,
                                     std::move(submission.outputs), inputs);
  work->set_body(std::move(body), timeout_or_default(submission.timeout));
  const bool caller_waits = !submission.async && !coalescing_;
  lock.unlock();
  executor_->submit(work, caller_waits);
  return note(work);
}

void ProcessGroupPSPlus::startCoalescing() {
  check_process();
  const std::lock_guard lock{mutex_};
  coalescing_ = true;
  coalescing_nccl_ = false;
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::endCoalescing() {
  check_process();
  std::unique_lock lock{mutex_};
  coalescing_ = false;
  if (std::exchange(coalescing_nccl_, false)) {
    lock.unlock();
    return nccl_->endCoalescing();
  }
  return c10::make_intrusive<CoalescedWork>(getRank(), std::exchange(coalesced_, {}));
}

uint64_t ProcessGroupPSPlus::getSequenceNumberForGroup() {
  check_process();
  const std::lock_guard lock{mutex_};
  return sequence_;
}

c10::intrusive_ptr<GroupWork> ProcessGroupPSPlus::make_message(OpType type, const char* title,
                                                               const Tensors& tensors) {
  const std::lock_guard lock{mutex_};
  return c10::make_intrusive<GroupWork>(getRank(), type, title, sequence_,
                                        type == OpType::SEND ? Tensors{} : tensors, tensors);
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::start_message(
    const c10::intrusive_ptr<GroupWork>& work) {
  // Before it sleeps, whoever waits looks for a moment itself: that saves two thread switches.
  work->set_helper([host = std::weak_ptr<Host>{host_}, raw = work.get()] {
    const auto held = host.lock();
    if (!held) return;
    const Deadline end = Deadline::after(held->group->spin());
    do {
      held->messages.help();
    } while (!raw->isCompleted() && !end.passed());
  });
  return note(work);
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = message_tensor(tensors, "send");
  if (auto* inner = inner_for_messages(tensor.device())) return note(inner->send(tensors, to, tag));
  const auto work = make_message(OpType::SEND, "psplus:send", tensors);
  const Buffer buffer = Buffer::of(tensor);
  host_->messages.send(static_cast<Rank>(to), collectives::Tag{tag}, buffer.data(), buffer.bytes(),
                       Deadline::after(timeout_),
                       [work, buffer, executor = executor_](const Status& status, Rank) {
                         work->end(status.ok() ? nullptr : to_exception(status));
                         executor->settle(work);  // callbacks may wait for messages
                       });
  return start_message(work);
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::receive(std::optional<Rank> from, Tensors& tensors,
                                                        int tag, OpType type) {
  const char* const title = from ? "psplus:recv" : "psplus:recvAnySource";
  const auto work = make_message(type, title, tensors);
  const Buffer buffer = Buffer::for_output(tensors.front());
  host_->messages.receive(from, collectives::Tag{tag}, buffer.data(), buffer.bytes(),
                          Deadline::after(timeout_),
                          [work, buffer, executor = executor_](const Status& status, Rank by) {
                            std::exception_ptr error;
                            try {
                              const at::AutoDispatchBelowADInplaceOrView below_autograd;
                              if (status.ok()) buffer.write_back();
                              if (!status.ok()) error = to_exception(status);
                            } catch (...) {
                              error = std::current_exception();
                            }
                            work->set_source(static_cast<int>(raw(by)));
                            work->end(error);
                            executor->settle(work);
                          });
  return start_message(work);
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor& tensor = message_tensor(tensors, "recv");
  if (auto* inner = inner_for_messages(tensor.device()))
    return note(inner->recv(tensors, from, tag));
  return receive(static_cast<Rank>(from), tensors, tag, OpType::RECV);
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = message_tensor(tensors, "recv");
  if (auto* inner = inner_for_messages(tensor.device()))
    return note(inner->recvAnysource(tensors, tag));
  return receive(std::nullopt, tensors, tag, OpType::RECVANYSOURCE);
}

void ProcessGroupPSPlus::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  check_process();
  if (gloo_) return gloo_->monitoredBarrier(opts, wait_all_ranks);
  const milliseconds timeout = timeout_or_default(opts.timeout);
  if (getRank() == 0 && timeout.count() <= 0)
    C10_THROW_ERROR(DistBackendError, formatted("Rank 0 timed out in monitoredBarrier after {} ms.",
                                                timeout.count()));
  const auto missing =
      collectives::monitored_barrier(group(), wait_all_ranks, Deadline::after(timeout));
  if (missing.empty()) return;
  if (getRank() != 0)
    C10_THROW_ERROR(DistBackendError,
                    formatted("Rank {} successfully reached monitoredBarrier, but received errors "
                              "while waiting for send/recv from rank 0. Please check rank 0 logs "
                              "for faulty rank.",
                              getRank()));
  std::vector<std::uint32_t> ranks;
  for (const Rank rank : missing) ranks.push_back(raw(rank));
  C10_THROW_ERROR(
      DistBackendError,
      formatted("[Rank 0]: {} {} failed to pass monitoredBarrier in {} ms",
                wait_all_ranks ? "Ranks" : "Rank", joined(ranks, ", "), timeout.count()));
}

ProcessGroupPSPlus::BackendPtr ProcessGroupPSPlus::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  check_process();
  Setup setup = setup_;
  setup.size = static_cast<int>(ranks.size());
  setup.global_ranks.clear();
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "psplus split: rank ", rank,
                      " is not in a group of ", getSize());
    TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, "psplus split: rank ",
                      rank, " is given twice");
    const auto of_parent = static_cast<std::size_t>(rank);
    setup.global_ranks.push_back(setup_.global_ranks.empty() ? of_parent  // torch's way to say all
                                                             : setup_.global_ranks.at(of_parent));
  }
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  setup.rank = static_cast<int>(own - ranks.begin());
  std::unique_lock lock{mutex_};
  setup.timeout = opts ? opts->timeout : timeout_;
  // torch may split once for each kind of device, with one store for both.
  const int count = splits_[ranks]++;
  lock.unlock();
  setup.store = c10::make_intrusive<c10d::PrefixStore>(formatted("psplus-split-{}", count), store);
  auto made = c10::make_intrusive<ProcessGroupPSPlus>(std::move(setup));
  if (opts) {
    made->options_->group_name = opts->group_name;
    made->options_->group_desc = opts->group_desc;
  }
  return made;
}

void ProcessGroupPSPlus::eagerConnectSingleDevice(at::Device device) {
  check_process();
  if (device.is_cuda()) nccl().eagerConnectSingleDevice(device);
}

c10d::ErrorType ProcessGroupPSPlus::getError() {
  check_process();
  if (gloo_) return gloo_->getError();
  switch (group().status().code()) {
    case StatusCode::kOk:
      return c10d::ErrorType::SUCCESS;
    case StatusCode::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case StatusCode::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    case StatusCode::kLayoutMismatch:
    case StatusCode::kConfig:
    case StatusCode::kNoSpace:
    case StatusCode::kBusy:
    case StatusCode::kClosed:
    case StatusCode::kInternal:
      break;
  }
  return c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupPSPlus::abort() {
  if (this_process() != owner_) return;
  if (host_) {
    group().abort();
    executor_->shutdown(Deadline::after(kPatienceAtShutdown));
    host_->messages.shutdown();
  }
  if (hosts_) {
    hosts_->abort();
    executor_->shutdown(Deadline::after(kPatienceAtShutdown));
  }
  if (gloo_) gloo_->abort();
  const std::lock_guard lock{mutex_};
  if (nccl_) nccl_->abort();
}

void ProcessGroupPSPlus::shutdown() {
  if (this_process() != owner_) return;
  {
    const std::lock_guard lock{mutex_};
    if (std::exchange(shut_down_, true)) return;
  }
  if (host_) {
    if (!executor_->drain(Deadline::after(kPatienceAtShutdown))) group().abort();
    executor_->shutdown(Deadline::after(kPatienceAtShutdown));
    host_->messages.shutdown();
    group().leave();
  }
  if (hosts_) {
    if (!executor_->drain(Deadline::after(kPatienceAtShutdown))) hosts_->abort();
    executor_->shutdown(Deadline::after(kPatienceAtShutdown));
    hosts_->leave();
  }
  if (gloo_) gloo_->shutdown();
  const std::lock_guard lock{mutex_};
  if (nccl_) nccl_->shutdown();
}

}  // namespace psplus::pg
