// all_reduce, reduce and reduce_scatter of ranks on several hosts.

#include <cstring>

#include "c10d/buffers.hpp"
#include "c10d/hosts.hpp"
#include "c10d/staged_reduction.hpp"

namespace psplus::pg {
namespace {

using collectives::ReduceSpec;
using collectives::Reduction;

at::Tensor space_for(std::size_t bytes) {
  return at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
}

std::byte* bytes_in(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

std::size_t elements_in(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}

/// Reduces what hosts have reduced, in the order given, to `out`, which may be one of them.
void reduce_terms(const ReduceSpec& within, const std::vector<const void*>& terms, void* out,
                  std::size_t elements) {
  const auto between =
      within.reduction == Reduction::premul_sum ? Reduction::sum : within.reduction;
  collectives::reduce_function(within.element, between)(
      out, {.sources = terms.data(), .factors = nullptr, .count = terms.size()}, elements);
}

}  // namespace

/// Each speaker gets one part of what the others have and reduces it in the order of hosts; then
/// the parts go to host `to`, or to all. As many bytes as in a ring, in two exchanges.
Status Hosts::reduce_among(const std::vector<Rank>& speakers, std::optional<std::size_t> to,
                           void* data, std::size_t elements, const ReduceSpec& spec,
                           Deadline deadline) {
  const std::size_t hosts = speakers.size();
  const std::size_t size = collectives::element_bytes(spec.element);
  const auto part = [&](std::size_t host) {
    return static_cast<std::byte*>(data) + elements * host / hosts * size;
  };
  const auto bytes = [&](std::size_t host) {
    return static_cast<std::size_t>(part(host + 1) - part(host));
  };
  const std::size_t own = places_.own;
  const at::Tensor theirs = space_for(hosts * bytes(own));
  std::vector<Links::Outgoing> sends;
  std::vector<Links::Incoming> receives;
  std::vector<const void*> terms;
  for (std::size_t host = 0; host < hosts; ++host) {
    std::byte* const term = host == own ? part(own) : bytes_in(theirs) + host * bytes(own);
    terms.push_back(term);
    if (host == own) continue;
    sends.push_back({speakers[host], part(host), bytes(host)});
    receives.push_back({speakers[host], term, bytes(own)});
  }
  if (Status status = exchange(sends, receives, deadline); !status.ok()) return status;
  reduce_terms(spec, terms, part(own), bytes(own) / size);

  sends.clear();
  receives.clear();
  for (std::size_t host = 0; host < hosts; ++host) {
    if (host == own) continue;
    if (!to || *to == host) sends.push_back({speakers[host], part(own), bytes(own)});
    if (!to || *to == own) receives.push_back({speakers[host], part(host), bytes(host)});
  }
  return exchange(sends, receives, deadline);
}

Status Hosts::all_reduce(const at::Tensor& tensor, const ReduceSpec& spec, Deadline deadline) {
  const StagedReduction staged{spec, places_.host_of.size()};
  const at::Tensor data = staged.input(tensor);
  const std::size_t elements = elements_in(data);
  const std::vector<Rank> talking = speakers();
  const Rank speaker = talking[places_.own];
  Status status = together([&]() -> Status {
    if (Status reduced = collectives::reduce(*local_, place(speaker), data.data_ptr(),
                                             data.data_ptr(), elements, staged.within(), deadline);
        !reduced.ok())
      return reduced;
    if (places_.rank == speaker)
      if (Status all = reduce_among(talking, std::nullopt, data.data_ptr(), elements,
                                    staged.within(), deadline);
          !all.ok())
        return all;
    return spread(speaker, data.data_ptr(), elements * staged.element_bytes(), deadline);
  });
  if (status.ok()) staged.finish(data, tensor);
  return status;
}

Status Hosts::reduce(Rank root, const at::Tensor& tensor, const ReduceSpec& spec,
                     Deadline deadline) {
  const StagedReduction staged{spec, places_.host_of.size()};
  const at::Tensor data = staged.input(tensor);
  const std::size_t elements = elements_in(data);
  const std::vector<Rank> talking = speakers(root);
  const Rank speaker = talking[places_.own];
  // Only the root's tensor may change.
  const at::Tensor sum = places_.rank == speaker ? at::empty_like(data) : at::Tensor{};
  void* const out = sum.defined() ? sum.data_ptr() : nullptr;
  Status status = together([&]() -> Status {
    if (Status reduced = collectives::reduce(*local_, place(speaker), data.data_ptr(), out,
                                             elements, staged.within(), deadline);
        !reduced.ok())
      return reduced;
    if (places_.rank != speaker) return {};
    return reduce_among(talking, places_.host_of[index(root)], out, elements, staged.within(),
                        deadline);
  });
  if (status.ok() && places_.rank == root) staged.finish(sum, tensor);
  return status;
}

/// Each host reduces what is meant for a rank and sends that to it, which takes a rank's number of
/// bytes from each other host. The ranks of a host share this work: one of them, by its number,
/// reduces and sends for each rank elsewhere.
Status Hosts::reduce_scatter(const std::vector<at::Tensor>& ins, const at::Tensor& out,
                             const ReduceSpec& spec, Deadline deadline) {
  const StagedReduction staged{spec, places_.host_of.size()};
  const auto worker = [&](std::size_t host, Rank rank) {
    const std::vector<Rank>& ranks = places_.hosts[host];
    return places_.host_of[index(rank)] == host ? rank : ranks[index(rank) % ranks.size()];
  };
  const Rank self = places_.rank;
  const std::size_t hosts = places_.hosts.size();
  at::Tensor mine;                   // this rank's part, reduced within the host
  std::vector<at::Tensor> reduced;   // others' parts
  std::vector<at::Tensor> received;  // this rank's part, reduced within other hosts
  std::vector<Links::Outgoing> sends;
  std::vector<Links::Incoming> receives;
  std::vector<const void*> terms;
  Status status = together([&]() -> Status {
    for (std::size_t i = 0; i < ins.size(); ++i) {
      const auto rank = static_cast<Rank>(i);
      const Rank by = worker(places_.own, rank);
      const at::Tensor data = staged.input(ins[i]);
      const at::Tensor sum = by == self ? at::empty_like(data) : at::Tensor{};
      if (Status done = collectives::reduce(*local_, place(by), data.data_ptr(),
                                            sum.defined() ? sum.data_ptr() : nullptr,
                                            elements_in(data), staged.within(), deadline);
          !done.ok())
        return done;
      if (rank == self) mine = sum;
      if (rank == self || !sum.defined()) continue;
      reduced.push_back(sum);
      sends.push_back({rank, sum.data_ptr(), sum.nbytes()});
    }
    for (std::size_t host = 0; host < hosts; ++host) {
      if (host != places_.own) {
        received.push_back(at::empty_like(mine));
        receives.push_back({worker(host, self), received.back().data_ptr(), mine.nbytes()});
      }
      terms.push_back(host == places_.own ? mine.data_ptr() : received.back().data_ptr());
    }
    return exchange(sends, receives, deadline);
  });
  if (!status.ok()) return status;
  reduce_terms(staged.within(), terms, mine.data_ptr(), elements_in(mine));
  staged.finish(mine, out);
  return {};
}

}  // namespace psplus::pg
