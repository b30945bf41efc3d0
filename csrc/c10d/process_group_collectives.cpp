// The collectives of ProcessGroupPSPlus on CPU tensors.

#include <utility>

#include "c10d/process_group.hpp"
#include "c10d/reduce_ops.hpp"

namespace psplus::pg {
namespace {

using c10d::OpType;
using collectives::ReduceSpec;
using Tensors = ProcessGroupPSPlus::Tensors;
using TensorLists = ProcessGroupPSPlus::TensorLists;

template <class T>
T& only_one(std::vector<T>& list, const char* call) {
  TORCH_CHECK_VALUE(list.size() == 1, "psplus ", call, " takes one tensor (or list), got ",
                    list.size());
  return list.front();
}

void check_dense(const at::Tensor& tensor, const char* call) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "psplus ", call,
                    " takes dense tensors, got one of layout ", tensor.layout());
}

void check_count(std::size_t count, int size, const char* call) {
  TORCH_CHECK_VALUE(count == static_cast<std::size_t>(size), "psplus ", call, ": ", count,
                    " tensors for ", size, " ranks");
}

void check_same(const at::Tensor& a, const at::Tensor& b, const char* call) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "psplus ", call,
                   ": tensors differ in dtype: ", a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK_VALUE(a.numel() == b.numel(), "psplus ", call, ": tensors of ", a.numel(), " and ",
                    b.numel(), " elements must have the same size");
}

/// `whole` has the elements of `part` once for each rank.
void check_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* call) {
  TORCH_CHECK_TYPE(whole.scalar_type() == part.scalar_type(), "psplus ", call,
                   ": tensors differ in dtype: ", whole.scalar_type(), " and ", part.scalar_type());
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, "psplus ", call, ": a tensor of ",
                    whole.numel(), " elements must be ", size, " times one of ", part.numel());
}

Rank root_of(std::int64_t root, int size, const char* call) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "psplus ", call, ": invalid root rank ", root,
                    " in a group of ", size);
  return static_cast<Rank>(root);
}

void check_splits(const std::vector<std::int64_t>& splits, const at::Tensor& tensor, int size,
                  const char* which) {
  if (splits.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() == 0 || tensor.size(0) % size == 0,
                      "psplus all_to_all: the first dimension of the ", which,
                      " does not divide equally across ", size, " ranks");
    return;
  }
  check_count(splits.size(), size, "all_to_all splits");
  std::int64_t sum = 0;
  for (const std::int64_t rows : splits) {
    TORCH_CHECK_VALUE(rows >= 0, "psplus all_to_all: negative split size ", rows);
    sum += rows;
  }
  TORCH_CHECK_VALUE(sum == tensor.size(0), "psplus all_to_all: split sizes of the ", which,
                    " sum up to ", sum, ", its first dimension is ", tensor.size(0));
}

}  // namespace

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::broadcast(Tensors& tensors,
                                                          const c10d::BroadcastOptions& opts) {
  at::Tensor& tensor = only_one(tensors, "broadcast");
  if (auto* inner = inner_for(tensor.device())) return note(inner->broadcast(tensors, opts));
  check_dense(tensor, "broadcast");
  const Rank root = root_of(opts.rootRank, getSize(), "broadcast");
  return submit({OpType::BROADCAST, "psplus:broadcast", tensors, opts.timeout, opts.asyncOp},
                tensors, [this, tensor, root](Deadline deadline) {
                  const bool sends = is_own(root);
                  const Buffer buffer = sends ? Buffer::of(tensor) : Buffer::for_output(tensor);
                  Status status =
                      hosts_ ? hosts_->broadcast(root, buffer.data(), buffer.bytes(), deadline)
                             : collectives::broadcast(group(), root, buffer.data(), buffer.bytes(),
                                                      deadline);
                  if (status.ok() && !sends) buffer.write_back();
                  return status;
                });
}

Status ProcessGroupPSPlus::reduce_all(const at::Tensor& tensor, const ReduceSpec& spec,
                                      Deadline deadline) {
  if (hosts_) return hosts_->all_reduce(tensor, spec, deadline);
  const Buffer buffer = Buffer::of(tensor);
  Status status = collectives::all_reduce(group(), buffer.data(), buffer.data(), buffer.elements(),
                                          spec, deadline);
  if (status.ok()) buffer.write_back();
  return status;
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::allreduce(Tensors& tensors,
                                                          const c10d::AllreduceOptions& opts) {
  at::Tensor& tensor = only_one(tensors, "all_reduce");
  if (auto* inner = inner_for(tensor.device())) return note(inner->allreduce(tensors, opts));
  if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  check_dense(tensor, "all_reduce");
  const ReduceSpec spec = to_spec(opts.reduceOp, tensor.scalar_type());
  return submit(
      {OpType::ALLREDUCE, "psplus:all_reduce", tensors, opts.timeout, opts.asyncOp}, tensors,
      [this, tensor, spec](Deadline deadline) { return reduce_all(tensor, spec, deadline); });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "psplus all_reduce_coalesced: no tensors given");
  if (auto* inner = inner_for(tensors[0].device()))
    return note(inner->allreduce_coalesced(tensors, opts));
  std::vector<ReduceSpec> specs;
  for (const at::Tensor& tensor : tensors) {
    check_dense(tensor, "all_reduce_coalesced");
    specs.push_back(to_spec(opts.reduceOp, tensor.scalar_type()));
  }
  return submit({OpType::ALLREDUCE_COALESCED, "psplus:all_reduce_coalesced", tensors, opts.timeout,
                 opts.asyncOp},
                tensors, [this, tensors, specs](Deadline deadline) {
                  Status status;
                  for (std::size_t i = 0; i < tensors.size() && status.ok(); ++i)
                    status = reduce_all(tensors[i], specs[i], deadline);
                  return status;
                });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& opts) {
  at::Tensor& tensor = only_one(tensors, "all_reduce of sparse tensors");
  if (auto* inner = inner_for(tensor.device())) return note(inner->allreduce_sparse(tensors, opts));
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse,
                    "psplus: all_reduce_sparse takes tensors of "
                    "layout torch.sparse_coo, got ",
                    tensor.layout());
  const bool average = opts.reduceOp.op_ == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(average || opts.reduceOp.op_ == c10d::ReduceOp::SUM,
                    "psplus: all_reduce of sparse tensors supports SUM and AVG");
  return submit(
      {OpType::_ALLREDUCE_SPARSE, "psplus:sparse_all_reduce", tensors, opts.timeout, opts.asyncOp},
      tensors, [this, tensor, average](Deadline deadline) mutable {
        return reduce_sparse(tensor, average, deadline);
      });
}

/// Everybody's indices and values, one after the other in the order of ranks, and then summed.
Status ProcessGroupPSPlus::reduce_sparse(at::Tensor& tensor, bool average, Deadline deadline) {
  const at::Tensor own = tensor.coalesce();
  const auto count = at::TensorOptions{}.dtype(at::kLong);
  const at::Tensor counts = at::empty({getSize()}, count);
  if (Status status = gather_into(counts, at::full({1}, own._nnz(), count), deadline); !status.ok())
    return status;
  Tensors indices;  // transposed, so that ranks are stretches of memory
  Tensors values;
  std::vector<std::int64_t> value_sizes = own._values().sizes().vec();
  for (std::int64_t rank = 0; rank < getSize(); ++rank) {
    value_sizes[0] = counts[rank].item<std::int64_t>();
    indices.push_back(at::empty({value_sizes[0], own.sparse_dim()}, count));
    values.push_back(at::empty(value_sizes, own._values().options()));
  }
  if (Status status = gather_all(indices, own._indices().t().contiguous(), deadline); !status.ok())
    return status;
  if (Status status = gather_all(values, own._values(), deadline); !status.ok()) return status;
  at::Tensor sum =
      at::sparse_coo_tensor(at::cat(indices).t(), at::cat(values), tensor.sizes(), tensor.options())
          .coalesce();
  if (average) sum._values().div_(getSize());
  tensor.copy_(sum);
  return {};
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::reduce(Tensors& tensors,
                                                       const c10d::ReduceOptions& opts) {
  at::Tensor& tensor = only_one(tensors, "reduce");
  if (auto* inner = inner_for(tensor.device())) return note(inner->reduce(tensors, opts));
  check_dense(tensor, "reduce");
  const Rank root = root_of(opts.rootRank, getSize(), "reduce");
  const ReduceSpec spec = to_spec(opts.reduceOp, tensor.scalar_type());
  return submit({OpType::REDUCE, "psplus:reduce", tensors, opts.timeout, opts.asyncOp}, tensors,
                [this, tensor, root, spec](Deadline deadline) {
                  if (hosts_) return hosts_->reduce(root, tensor, spec, deadline);
                  const Buffer buffer = Buffer::of(tensor);
                  Status status = collectives::reduce(group(), root, buffer.data(), buffer.data(),
                                                      buffer.elements(), spec, deadline);
                  if (status.ok() && is_own(root)) buffer.write_back();
                  return status;
                });
}

Status ProcessGroupPSPlus::gather_buffers(const Buffers& outs, const Buffer& in,
                                          Deadline deadline) {
  Status status =
      hosts_ ? hosts_->all_gather(in.data(), outs.pointers(), outs.bytes(), deadline)
             : collectives::all_gather(group(), in.data(), outs.pointers(), outs.bytes(), deadline);
  if (status.ok()) outs.write_back();
  return status;
}

Status ProcessGroupPSPlus::gather_all(const Tensors& outputs, const at::Tensor& input,
                                      Deadline deadline) {
  const Buffer in = Buffer::of(input);
  const Buffers outs = Buffers::for_output(outputs);
  return gather_buffers(outs, in, deadline);
}

Status ProcessGroupPSPlus::gather_into(const at::Tensor& output, const at::Tensor& input,
                                       Deadline deadline) {
  const Buffer in = Buffer::of(input);
  const Buffers outs = Buffers::slices(Buffer::for_output(output), output, {}, ranks());
  return gather_buffers(outs, in, deadline);
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::allgather(TensorLists& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  at::Tensor& input = only_one(inputs, "all_gather");
  if (auto* inner = inner_for(input.device())) return note(inner->allgather(outputs, inputs, opts));
  Tensors& list = only_one(outputs, "all_gather");
  check_count(list.size(), getSize(), "all_gather");
  check_dense(input, "all_gather");
  check_same(list[static_cast<std::size_t>(getRank())], input, "all_gather");
  for (const at::Tensor& tensor : list) check_dense(tensor, "all_gather");
  return submit(
      {OpType::ALLGATHER, "psplus:all_gather", list, opts.timeout, opts.asyncOp}, inputs,
      [this, list, input](Deadline deadline) { return gather_all(list, input, deadline); });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  if (auto* inner = inner_for(input.device()))
    return note(inner->_allgather_base(output, input, opts));
  check_whole(output, input, getSize(), "all_gather_into_tensor");
  return submit(
      {OpType::_ALLGATHER_BASE, "psplus:_all_gather_base", {output}, opts.timeout, opts.asyncOp},
      {input},
      [this, output, input](Deadline deadline) { return gather_into(output, input, deadline); });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "psplus all_gather_coalesced: no tensors given");
  if (auto* inner = inner_for(inputs[0].device()))
    return note(inner->allgather_coalesced(outputs, inputs, opts));
  check_count(outputs.size(), getSize(), "all_gather_coalesced");
  TensorLists by_input(inputs.size());
  Tensors all;
  for (const Tensors& of_rank : outputs) {
    TORCH_CHECK_VALUE(of_rank.size() == inputs.size(),
                      "psplus all_gather_coalesced: ", of_rank.size(), " outputs for ",
                      inputs.size(), " inputs");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_same(of_rank[i], inputs[i], "all_gather_coalesced");
      by_input[i].push_back(of_rank[i]);
      all.push_back(of_rank[i]);
    }
  }
  return submit(
      {OpType::ALLGATHER_COALESCED, "psplus:all_gather_coalesced", all, opts.timeout, opts.asyncOp},
      inputs, [this, by_input, inputs](Deadline deadline) {
        Status status;
        for (std::size_t i = 0; i < inputs.size() && status.ok(); ++i)
          status = gather_all(by_input[i], inputs[i], deadline);
        return status;
      });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "psplus all_gather_into_tensor_coalesced: ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  if (auto* inner = inner_for(inputs[0].device()))
    return note(inner->allgather_into_tensor_coalesced(outputs, inputs, opts));
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check_whole(outputs[i], inputs[i], getSize(), "all_gather_into_tensor_coalesced");
  return submit({OpType::COALESCED, "psplus:all_gather_into_tensor_coalesced", outputs,
                 opts.timeout, opts.asyncOp},
                inputs, [this, outputs, inputs](Deadline deadline) {
                  Status status;
                  for (std::size_t i = 0; i < inputs.size() && status.ok(); ++i)
                    status = gather_into(outputs[i], inputs[i], deadline);
                  return status;
                });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::gather(TensorLists& outputs, Tensors& inputs,
                                                       const c10d::GatherOptions& opts) {
  at::Tensor& input = only_one(inputs, "gather");
  if (auto* inner = inner_for(input.device())) return note(inner->gather(outputs, inputs, opts));
  check_dense(input, "gather");
  const Rank root = root_of(opts.rootRank, getSize(), "gather");
  Tensors list;
  if (is_own(root)) {
    list = only_one(outputs, "gather");
    check_count(list.size(), getSize(), "gather");
    for (const at::Tensor& tensor : list) check_same(tensor, input, "gather");
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "psplus gather: only the root takes outputs");
  }
  return submit({OpType::GATHER, "psplus:gather", list, opts.timeout, opts.asyncOp}, inputs,
                [this, list, input, root](Deadline deadline) {
                  const Buffer in = Buffer::of(input);
                  const Buffers outs = Buffers::for_output(list);
                  Status status =
                      hosts_
                          ? hosts_->gather(root, in.data(), outs.pointers(), in.bytes(), deadline)
                          : collectives::gather(group(), root, in.data(), outs.pointers(),
                                                in.bytes(), deadline);
                  if (status.ok()) outs.write_back();
                  return status;
                });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::scatter(Tensors& outputs, TensorLists& inputs,
                                                        const c10d::ScatterOptions& opts) {
  at::Tensor& output = only_one(outputs, "scatter");
  if (auto* inner = inner_for(output.device())) return note(inner->scatter(outputs, inputs, opts));
  check_dense(output, "scatter");
  const Rank root = root_of(opts.rootRank, getSize(), "scatter");
  Tensors list;
  if (is_own(root)) {
    list = only_one(inputs, "scatter");
    check_count(list.size(), getSize(), "scatter");
    for (const at::Tensor& tensor : list) check_same(tensor, output, "scatter");
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "psplus scatter: only the root takes inputs");
  }
  return submit({OpType::SCATTER, "psplus:scatter", outputs, opts.timeout, opts.asyncOp}, list,
                [this, list, output, root](Deadline deadline) {
                  const Buffers ins = Buffers::of(list);
                  const Buffer out = Buffer::for_output(output);
                  Status status = hosts_ ? hosts_->scatter(root, ins.const_pointers(), out.data(),
                                                           out.bytes(), deadline)
                                         : collectives::scatter(group(), root, ins.const_pointers(),
                                                                out.data(), out.bytes(), deadline);
                  if (status.ok()) out.write_back();
                  return status;
                });
}

Status ProcessGroupPSPlus::scatter_reduced(const at::Tensor& output, const Tensors& inputs,
                                           const ReduceSpec& spec, Deadline deadline) {
  if (hosts_) return hosts_->reduce_scatter(inputs, output, spec, deadline);
  const Buffers ins = Buffers::of(inputs);
  const Buffer out = Buffer::for_output(output);
  Status status = collectives::reduce_scatter(
      group(), ins.const_pointers(), ins.elements(collectives::element_bytes(spec.element)),
      out.data(), spec, deadline);
  if (status.ok()) out.write_back();
  return status;
}

Status ProcessGroupPSPlus::scatter_reduced_from(const at::Tensor& output, const at::Tensor& input,
                                                const ReduceSpec& spec, Deadline deadline) {
  const Buffer whole = Buffer::of(input);
  if (hosts_)
    return hosts_->reduce_scatter(
        whole.plain().reshape({getSize(), input.numel() / getSize()}).unbind(0), output, spec,
        deadline);
  const Buffers ins = Buffers::slices(whole, input, {}, ranks());
  const Buffer out = Buffer::for_output(output);
  Status status = collectives::reduce_scatter(
      group(), ins.const_pointers(), ins.elements(collectives::element_bytes(spec.element)),
      out.data(), spec, deadline);
  if (status.ok()) out.write_back();
  return status;
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  at::Tensor& output = only_one(outputs, "reduce_scatter");
  if (auto* inner = inner_for(output.device()))
    return note(inner->reduce_scatter(outputs, inputs, opts));
  Tensors& list = only_one(inputs, "reduce_scatter");
  check_count(list.size(), getSize(), "reduce_scatter");
  check_same(list[static_cast<std::size_t>(getRank())], output, "reduce_scatter");
  for (const at::Tensor& tensor : list) check_dense(tensor, "reduce_scatter");
  const ReduceSpec spec = to_spec(opts.reduceOp, output.scalar_type());
  return submit(
      {OpType::REDUCE_SCATTER, "psplus:reduce_scatter", outputs, opts.timeout, opts.asyncOp}, list,
      [this, output, list, spec](Deadline deadline) {
        return scatter_reduced(output, list, spec, deadline);
      });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  if (auto* inner = inner_for(output.device()))
    return note(inner->_reduce_scatter_base(output, input, opts));
  check_whole(input, output, getSize(), "reduce_scatter_tensor");
  const ReduceSpec spec = to_spec(opts.reduceOp, output.scalar_type());
  return submit({OpType::_REDUCE_SCATTER_BASE,
                 "psplus:_reduce_scatter_base",
                 {output},
                 opts.timeout,
                 opts.asyncOp},
                {input}, [this, output, input, spec](Deadline deadline) {
                  return scatter_reduced_from(output, input, spec, deadline);
                });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "psplus reduce_scatter_tensor_coalesced: ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  if (auto* inner = inner_for(outputs[0].device()))
    return note(inner->reduce_scatter_tensor_coalesced(outputs, inputs, opts));
  std::vector<ReduceSpec> specs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_whole(inputs[i], outputs[i], getSize(), "reduce_scatter_tensor_coalesced");
    specs.push_back(to_spec(opts.reduceOp, outputs[i].scalar_type()));
  }
  return submit({OpType::REDUCE_SCATTER_TENSOR_COALESCED, "psplus:reduce_scatter_tensor_coalesced",
                 outputs, opts.timeout, opts.asyncOp},
                inputs, [this, outputs, inputs, specs](Deadline deadline) {
                  Status status;
                  for (std::size_t i = 0; i < inputs.size() && status.ok(); ++i)
                    status = scatter_reduced_from(outputs[i], inputs[i], specs[i], deadline);
                  return status;
                });
}

Status ProcessGroupPSPlus::exchange_buffers(const Buffers& ins, const Buffers& outs,
                                            Deadline deadline) {
  Status status = hosts_ ? hosts_->all_to_all(ins.const_pointers(), ins.bytes(), outs.pointers(),
                                              outs.bytes(), deadline)
                         : collectives::all_to_all(group(), ins.const_pointers(), ins.bytes(),
                                                   outs.pointers(), outs.bytes(), deadline);
  if (status.ok()) outs.write_back();
  return status;
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
    std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  if (auto* inner = inner_for(input.device()))
    return note(inner->alltoall_base(output, input, output_splits, input_splits, opts));
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(),
                   "psplus all_to_all_single: tensors differ in dtype");
  check_splits(output_splits, output, getSize(), "output");
  check_splits(input_splits, input, getSize(), "input");
  return submit({OpType::ALLTOALL_BASE, "psplus:all_to_all", {output}, opts.timeout, opts.asyncOp},
                {input}, [this, output, input, output_splits, input_splits](Deadline deadline) {
                  const Buffers ins =
                      Buffers::slices(Buffer::of(input), input, input_splits, ranks());
                  const Buffers outs =
                      Buffers::slices(Buffer::for_output(output), output, output_splits, ranks());
                  return exchange_buffers(ins, outs, deadline);
                });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::alltoall(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllToAllOptions& opts) {
  check_count(inputs.size(), getSize(), "all_to_all");
  check_count(outputs.size(), getSize(), "all_to_all");
  if (auto* inner = inner_for(inputs[0].device()))
    return note(inner->alltoall(outputs, inputs, opts));
  for (const at::Tensor& tensor : inputs) check_dense(tensor, "all_to_all");
  for (const at::Tensor& tensor : outputs) check_dense(tensor, "all_to_all");
  return submit({OpType::ALLTOALL, "psplus:all_to_all", outputs, opts.timeout, opts.asyncOp},
                inputs, [this, outputs, inputs](Deadline deadline) {
                  const Buffers ins = Buffers::of(inputs);
                  const Buffers outs = Buffers::for_output(outputs);
                  return exchange_buffers(ins, outs, deadline);
                });
}

ProcessGroupPSPlus::WorkPtr ProcessGroupPSPlus::barrier(const c10d::BarrierOptions& opts) {
  check_process();
  if (gloo_ && !hosts_) return note(gloo_->barrier(opts));
  return submit({OpType::BARRIER, "psplus:barrier", {}, opts.timeout, opts.asyncOp}, {},
                [this](Deadline deadline) {
                  return hosts_ ? hosts_->barrier(deadline)
                                : collectives::barrier(group(), deadline);
                });
}

}  // namespace psplus::pg
