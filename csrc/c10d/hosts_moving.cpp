// The collectives of ranks on several hosts that move data as it is.

#include <vector>

#include "c10d/hosts.hpp"

namespace psplus::pg {

template <class T>
std::vector<T> Hosts::of_host(std::span<T const> all) const {
  std::vector<T> result;
  for (const Rank rank : here()) result.push_back(all[index(rank)]);
  return result;
}

/// A binomial tree of speakers, whose root is the one of host `from`: a host that has the data
/// passes it on to the one half as far away each time.
Status Hosts::pass_on(const std::vector<Rank>& speakers, std::size_t from, void* data,
                      std::size_t bytes, Deadline deadline,
                      const std::function<Status()>& meanwhile) {
  const std::size_t hosts = speakers.size();
  const std::size_t own = (places_.own + hosts - from) % hosts;  // counted from the root's
  const auto speaker = [&](std::size_t host) { return speakers[(host + from) % hosts]; };
  std::size_t distance = 1;
  while (distance < hosts && (own & distance) == 0) distance *= 2;
  if (own != 0) {
    const Links::Incoming receive{speaker(own - distance), data, bytes};
    if (Status status = exchange({}, {&receive, 1}, deadline); !status.ok()) return status;
  }
  std::vector<Links::Outgoing> sends;
  while ((distance /= 2) != 0)
    if (own + distance < hosts) sends.push_back({speaker(own + distance), data, bytes});
  return exchange(sends, {}, deadline, meanwhile);
}

Status Hosts::broadcast(Rank root, void* data, std::size_t bytes, Deadline deadline) {
  const std::vector<Rank> talking = speakers(root);
  const Rank speaker = talking[places_.own];
  const auto within = [&] {
    if (speaker != root) return spread(speaker, data, bytes, deadline);
    return collectives::broadcast(*local_, place(speaker), data, bytes, deadline);
  };
  return together([&] {
    if (places_.rank != speaker) return within();
    return pass_on(talking, places_.host_of[index(root)], data, bytes, deadline, within);
  });
}

/// Each rank sends its own to the other hosts' speakers, which spread it there.
Status Hosts::all_gather(const void* in, std::span<void* const> outs,
                         std::span<const std::size_t> bytes, Deadline deadline) {
  const std::vector<Rank> talking = speakers();
  const Rank speaker = talking[places_.own];
  std::vector<Links::Outgoing> sends;
  std::vector<Links::Incoming> receives;
  for (std::size_t host = 0; host < talking.size(); ++host)
    if (host != places_.own) sends.push_back({talking[host], in, bytes[index(places_.rank)]});
  for (std::size_t rank = 0; rank < outs.size() && places_.rank == speaker; ++rank)
    if (!is_here(static_cast<Rank>(rank)))
      receives.push_back({static_cast<Rank>(rank), outs[rank], bytes[rank]});
  return together([&] {
    Status status = exchange(sends, receives, deadline, [&] {
      return collectives::all_gather(*local_, in, of_host(outs), of_host(bytes), deadline);
    });
    for (std::size_t rank = 0; rank < outs.size() && status.ok(); ++rank)
      if (!is_here(static_cast<Rank>(rank)))
        status = spread(speaker, outs[rank], bytes[rank], deadline);
    return status;
  });
}

Status Hosts::gather(Rank root, const void* in, std::span<void* const> outs, std::size_t bytes,
                     Deadline deadline) {
  return together([&] {
    if (!is_here(root)) {
      const Links::Outgoing send{root, in, bytes};
      return exchange({&send, 1}, {}, deadline);
    }
    std::vector<Links::Incoming> receives;
    for (std::size_t rank = 0; rank < outs.size(); ++rank)
      if (!is_here(static_cast<Rank>(rank)))
        receives.push_back({static_cast<Rank>(rank), outs[rank], bytes});
    return exchange({}, receives, deadline, [&] {
      const auto places = outs.empty() ? std::vector<void*>{} : of_host(outs);
      return collectives::gather(*local_, place(root), in, places, bytes, deadline);
    });
  });
}

Status Hosts::scatter(Rank root, std::span<const void* const> ins, void* out, std::size_t bytes,
                      Deadline deadline) {
  return together([&] {
    if (!is_here(root)) {
      const Links::Incoming receive{root, out, bytes};
      return exchange({}, {&receive, 1}, deadline);
    }
    std::vector<Links::Outgoing> sends;
    for (std::size_t rank = 0; rank < ins.size(); ++rank)
      if (!is_here(static_cast<Rank>(rank)))
        sends.push_back({static_cast<Rank>(rank), ins[rank], bytes});
    return exchange(sends, {}, deadline, [&] {
      const auto places = ins.empty() ? std::vector<const void*>{} : of_host(ins);
      return collectives::scatter(*local_, place(root), places, out, bytes, deadline);
    });
  });
}

Status Hosts::all_to_all(std::span<const void* const> ins, std::span<const std::size_t> in_bytes,
                         std::span<void* const> outs, std::span<const std::size_t> out_bytes,
                         Deadline deadline) {
  std::vector<Links::Outgoing> sends;
  std::vector<Links::Incoming> receives;
  for (std::size_t i = 1; i < ins.size(); ++i) {  // everybody begins with another one
    const auto rank = static_cast<Rank>((index(places_.rank) + i) % ins.size());
    if (is_here(rank)) continue;
    sends.push_back({rank, ins[index(rank)], in_bytes[index(rank)]});
    receives.push_back({rank, outs[index(rank)], out_bytes[index(rank)]});
  }
  return together([&] {
    return exchange(sends, receives, deadline, [&] {
      return collectives::all_to_all(*local_, of_host(ins), of_host(in_bytes), of_host(outs),
                                     of_host(out_bytes), deadline);
    });
  });
}

/// Within the host, among speakers, and back. Speakers wait for one that is once, twice, four times
/// and so on as far away, until each has heard of all others.
Status Hosts::barrier(Deadline deadline) {
  const std::vector<Rank> talking = speakers();
  const std::size_t hosts = talking.size();
  return together([&]() -> Status {
    if (Status status = collectives::barrier(*local_, deadline); !status.ok()) return status;
    const std::byte here{};
    std::byte there{};
    for (std::size_t step = 1; step < hosts && places_.rank == talking[places_.own]; step *= 2) {
      const Links::Outgoing send{talking[(places_.own + step) % hosts], &here, 1};
      const Links::Incoming receive{talking[(places_.own + hosts - step) % hosts], &there, 1};
      if (Status status = exchange({&send, 1}, {&receive, 1}, deadline); !status.ok())
        return status;
    }
    return spread(talking[places_.own], nullptr, 0, deadline);
  });
}

}  // namespace psplus::pg
