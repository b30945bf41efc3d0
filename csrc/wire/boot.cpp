#include "wire/boot.hpp"

#include <algorithm>
#include <span>

#include "wire/codec.hpp"

namespace psplus::wire {

Status send_boot(const UnixSocket& socket, const std::vector<int>& segments, int predecessor,
                 Deadline deadline) {
  Writer writer;
  writer.put(static_cast<std::uint32_t>(segments.size()));
  writer.put(static_cast<std::uint8_t>(predecessor >= 0));
  const auto header = writer.take();
  const std::span<const int> pidfd{&predecessor, predecessor >= 0 ? 1u : 0u};
  if (Status status = socket.send(header, pidfd, deadline); !status.ok()) return status;
  constexpr std::byte kMore[1] = {};
  for (std::size_t i = 0; i < segments.size(); i += UnixSocket::kMaxFds) {
    const auto part =
        std::span{segments}.subspan(i, std::min(UnixSocket::kMaxFds, segments.size() - i));
    if (Status status = socket.send(kMore, part, deadline); !status.ok()) return status;
  }
  return {};
}

Result<Boot> receive_boot(const UnixSocket& socket, Deadline deadline) {
  auto message = socket.receive(deadline);
  if (!message.ok()) return message.status();
  Reader reader{message->bytes};
  const auto count = reader.get<std::uint32_t>();
  const bool has_predecessor = reader.get<std::uint8_t>() != 0;
  if (!reader.finished() || message->fds.size() != (has_predecessor ? 1u : 0u))
    return Status{StatusCode::kInternal, "a damaged start message"};
  Boot boot;
  if (has_predecessor) boot.predecessor = std::move(message->fds.front());
  while (boot.segments.size() < count) {
    auto more = socket.receive(deadline);
    if (!more.ok()) return more.status();
    if (more->fds.empty()) return Status{StatusCode::kInternal, "a damaged start message"};
    for (UniqueFd& fd : more->fds) boot.segments.push_back(std::move(fd));
  }
  return boot;
}

Status send_boot_reply(const UnixSocket& socket, const BootReply& reply, Deadline deadline) {
  Writer writer;
  writer.put(reply.result);
  writer.put_string(std::string_view{reply.text}.substr(0, 4096));
  return socket.send(writer.take(), {}, deadline);
}

Result<BootReply> receive_boot_reply(const UnixSocket& socket, Deadline deadline) {
  auto message = socket.receive(deadline);
  if (!message.ok()) return message.status();
  Reader reader{message->bytes};
  BootReply reply;
  reply.result = reader.get<BootResult>();
  reply.text = reader.get_string();
  if (!reader.finished() || reply.result > BootResult::kFailed)
    return Status{StatusCode::kInternal, "a damaged answer of a starting server"};
  return reply;
}

}  // namespace psplus::wire
