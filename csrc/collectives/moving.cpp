// The collectives that move data as it is.

#include <algorithm>

#include "base/format.hpp"
#include "collectives/collectives.hpp"
#include "collectives/passage.hpp"
#include "collectives/pieces.hpp"

namespace psplus::collectives {

Status broadcast(Group& group, Rank root, void* data, std::size_t bytes, Deadline deadline) {
  check_rank(group, root);
  const Call call{.collective = Collective::broadcast, .root = root, .bytes = bytes};
  Passage passage{group, call, deadline};
  const std::size_t piece = group.memory().slot_bytes();
  const std::uint64_t rounds = rounds_for(bytes, piece);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    if (group.rank() == root) {
      if (Status status = passage.claim(round); !status.ok()) return status;
      copy_piece(passage.own(round), data, bytes, round, piece);
      passage.publish(round);
    } else {
      if (Status status = passage.await(root, round); !status.ok()) return status;
      place_piece(data, passage.slot(root, round), bytes, round, piece);
    }
    passage.release(round);
  }
  passage.finish(rounds);
  return {};
}

Status all_gather(Group& group, const void* in, std::span<void* const> outs,
                  std::span<const std::size_t> bytes, Deadline deadline) {
  check_length(group, outs.size(), "outputs");
  check_length(group, bytes.size(), "sizes");
  const std::size_t mine = index(group.rank());
  std::size_t total = 0;
  for (const std::size_t n : bytes) total += n;
  const Call call{.collective = Collective::all_gather, .bytes = total};
  Passage passage{group, call, deadline};
  const std::size_t piece = group.memory().slot_bytes();
  const std::uint64_t rounds = rounds_for(*std::max_element(bytes.begin(), bytes.end()), piece);
  const auto fill = [&](std::uint64_t round) -> Status {
    if (Status status = passage.claim(round); !status.ok()) return status;
    copy_piece(passage.own(round), in, bytes[mine], round, piece);
    passage.publish(round);
    return {};
  };
  if (Status status = fill(0); !status.ok()) return status;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    if (round + 1 < rounds)
      if (Status status = fill(round + 1); !status.ok()) return status;
    for (std::size_t i = 0; i < passage.peers(); ++i) {
      const Rank peer = passage.peer(i);
      if (Status status = passage.await(peer, round); !status.ok()) return status;
      place_piece(outs[index(peer)], passage.slot(peer, round), bytes[index(peer)], round, piece);
    }
    passage.release(round);
  }
  passage.finish(rounds);
  copy_own(outs[mine], in, bytes[mine]);
  return {};
}

Status all_to_all(Group& group, std::span<const void* const> ins,
                  std::span<const std::size_t> in_bytes, std::span<void* const> outs,
                  std::span<const std::size_t> out_bytes, Deadline deadline) {
  check_length(group, ins.size(), "inputs");
  check_length(group, in_bytes.size(), "input sizes");
  check_length(group, outs.size(), "outputs");
  check_length(group, out_bytes.size(), "output sizes");
  const std::size_t mine = index(group.rank());
  // The first line of each piece says how long the whole is, so that both ends are compared, and
  // the header how many rounds its sender needs: no rank knows what goes on between two others.
  const std::size_t room = piece_bytes(group);
  const std::size_t piece = room - kCacheLine;
  std::size_t longest = 0;
  for (std::size_t to = 0; to < in_bytes.size(); ++to)
    if (to != mine) longest = std::max(longest, in_bytes[to]);
  const Call call{.collective = Collective::all_to_all, .rounds = rounds_for(longest, piece)};
  Passage passage{group, call, deadline};
  std::uint64_t rounds = call.rounds;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    if (Status status = passage.claim(round); !status.ok()) return status;
    for (std::size_t i = 0; i < passage.peers(); ++i) {
      const std::size_t to = index(passage.peer(i));
      std::byte* const place = passage.own(round) + to * room;
      const std::uint64_t whole = in_bytes[to];
      std::memcpy(place, &whole, sizeof(whole));
      copy_piece(place + kCacheLine, ins[to], in_bytes[to], round, piece);
    }
    passage.publish(round);
    for (std::size_t i = 0; i < passage.peers(); ++i) {
      const Rank peer = passage.peer(i);
      if (Status status = passage.await(peer, round); !status.ok()) return status;
      if (round == 0) rounds = std::max(rounds, passage.header(peer).rounds);
      const std::byte* const place = passage.slot(peer, round) + mine * room;
      std::uint64_t whole = 0;
      std::memcpy(&whole, place, sizeof(whole));
      if (whole != out_bytes[index(peer)])
        return group.give_up(StatusCode::kLayoutMismatch, peer,
                             formatted("all_to_all: rank {} sends {} bytes to rank {}, which "
                                       "expects {}",
                                       group.called(peer), whole, group.called(group.rank()),
                                       out_bytes[index(peer)]));
      place_piece(outs[index(peer)], place + kCacheLine, whole, round, piece);
    }
    passage.release(round);
  }
  passage.finish(rounds);
  copy_own(outs[mine], ins[mine], std::min(in_bytes[mine], out_bytes[mine]));
  return {};
}

Status gather(Group& group, Rank root, const void* in, std::span<void* const> outs,
              std::size_t bytes, Deadline deadline) {
  check_rank(group, root);
  if (group.rank() == root) check_length(group, outs.size(), "outputs");
  const Call call{.collective = Collective::gather, .root = root, .bytes = bytes};
  Passage passage{group, call, deadline};
  const std::size_t piece = group.memory().slot_bytes();
  const std::uint64_t rounds = rounds_for(bytes, piece);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    if (group.rank() != root) {
      if (Status status = passage.claim(round); !status.ok()) return status;
      copy_piece(passage.own(round), in, bytes, round, piece);
      passage.publish(round);
    } else {
      for (std::size_t i = 0; i < passage.peers(); ++i) {
        const Rank peer = passage.peer(i);
        if (Status status = passage.await(peer, round); !status.ok()) return status;
        place_piece(outs[index(peer)], passage.slot(peer, round), bytes, round, piece);
      }
    }
    passage.release(round);
  }
  passage.finish(rounds);
  if (group.rank() == root) copy_own(outs[index(root)], in, bytes);
  return {};
}

Status scatter(Group& group, Rank root, std::span<const void* const> ins, void* out,
               std::size_t bytes, Deadline deadline) {
  check_rank(group, root);
  if (group.rank() == root) check_length(group, ins.size(), "inputs");
  const std::size_t mine = index(group.rank());
  const Call call{.collective = Collective::scatter, .root = root, .bytes = bytes};
  Passage passage{group, call, deadline};
  const std::size_t piece = piece_bytes(group);
  const std::uint64_t rounds = rounds_for(bytes, piece);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    if (group.rank() == root) {
      if (Status status = passage.claim(round); !status.ok()) return status;
      for (std::size_t i = 0; i < passage.peers(); ++i) {
        const std::size_t to = index(passage.peer(i));
        copy_piece(passage.own(round) + to * piece, ins[to], bytes, round, piece);
      }
      passage.publish(round);
    } else {
      if (Status status = passage.await(root, round); !status.ok()) return status;
      place_piece(out, passage.slot(root, round) + mine * piece, bytes, round, piece);
    }
    passage.release(round);
  }
  passage.finish(rounds);
  if (group.rank() == root) copy_own(out, ins[mine], bytes);
  return {};
}

Status barrier(Group& group, Deadline deadline) {
  const Call call{.collective = Collective::barrier};
  Passage passage{group, call, deadline};
  if (Status status = passage.claim(0); !status.ok()) return status;
  passage.publish(0);
  if (Status status = passage.await_all(0); !status.ok()) return status;
  passage.finish(1);
  return {};
}

std::vector<Rank> monitored_barrier(Group& group, bool wait_all, Deadline deadline) {
  const std::uint64_t turn = ++group.monitored;
  group.announce(group.own().monitored, turn);
  const GroupMemory& memory = group.memory();
  if (group.rank() != Rank{0}) {
    const bool answered = group.watch(Rank{0}, memory.words(0).let_go, turn, deadline);
    return answered ? std::vector<Rank>{} : std::vector{Rank{0}};
  }
  std::vector<Rank> missing;
  for (std::size_t peer = 1; peer < group.size(); ++peer) {
    const auto rank = static_cast<Rank>(peer);
    if (group.watch(rank, memory.words(peer).monitored, turn, deadline)) continue;
    missing.push_back(rank);
    if (!wait_all) break;
  }
  if (missing.empty()) group.announce(group.own().let_go, turn);
  return missing;
}

}  // namespace psplus::collectives
