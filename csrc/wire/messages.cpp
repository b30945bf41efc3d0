#include "wire/messages.hpp"

#include <utility>

#include "store/limits.hpp"
#include "wire/codec.hpp"

namespace psplus::wire {
namespace {

// One field list a message serves both directions: `Io` is an Encoder or a Decoder.

struct Encoder {
  Writer& writer;
  template <class T>
  void operator()(const T& value) {
    if constexpr (std::is_same_v<T, bool>)
      writer.put(static_cast<std::uint8_t>(value));
    else if constexpr (std::is_same_v<T, std::string>)
      writer.put_string(value);
    else
      writer.put(value);
  }
};

struct Decoder {
  Reader& reader;
  template <class T>
  void operator()(T& value) {
    if constexpr (std::is_same_v<T, bool>)
      value = reader.get<std::uint8_t>() != 0;
    else if constexpr (std::is_same_v<T, std::string>)
      value = reader.get_string();
    else
      value = reader.get<T>();
  }
};

template <class Io, class M>
void fields(Io io, M& m) {
  using T = std::remove_const_t<M>;
  if constexpr (std::is_same_v<T, Attach>) {
    io(m.protocol), io(m.rank), io(m.world_size), io(m.process);
  } else if constexpr (std::is_same_v<T, Resume>) {
    io(m.protocol), io(m.job), io(m.member), io(m.incarnation);
  } else if constexpr (std::is_same_v<T, OpenStream>) {
    io(m.stream), io(m.extent), io(m.mode), io(m.pull);
    io(m.rule.kind), io(m.rule.planes), io(m.bound);
    io(m.layout_bytes), io(m.blob_bytes), io(m.has_blob);
  } else if constexpr (std::is_same_v<T, Welcome>) {
    io(m.job), io(m.member), io(m.incarnation), io(m.epoch);
  } else if constexpr (std::is_same_v<T, StreamReady>) {
    io(m.stream), io(m.extent), io(m.provides), io(m.rejoined);
    io(m.clock), io(m.barriers), io(m.blob_segment);
  } else if constexpr (std::is_same_v<T, Refused>) {
    io(m.code), io(m.fatal), io(m.text);
  } else if constexpr (requires { m.segment; }) {
    io(m.segment);
  } else if constexpr (requires { m.stream; }) {
    io(m.stream);
  } else {
    static_assert(std::is_empty_v<T>, "a message without a field list");
  }
}

template <class Message>
std::vector<std::byte> encode_any(const Message& message) {
  Writer writer;
  writer.put(static_cast<std::uint8_t>(message.index()));
  std::visit([&](const auto& m) { fields(Encoder{writer}, m); }, message);
  return writer.take();
}

template <class Message, std::size_t... Kinds>
Result<Message> decode_any(std::span<const std::byte> bytes, std::index_sequence<Kinds...>) {
  Reader reader{bytes};
  const auto kind = reader.get<std::uint8_t>();
  Message message;
  const bool known =
      ((kind == Kinds ? (fields(Decoder{reader}, message.template emplace<Kinds>()), true)
                      : false) ||
       ...);
  if (!known || !reader.finished())
    return Status{StatusCode::kInternal, "a damaged message on the job's socket"};
  return message;
}

bool in_range(StreamId stream) { return index(stream) < store::kMaxStreams; }

/// Ids index fixed arrays, so they are checked where they enter.
template <class Message>
bool in_range(const Message& message) {
  return std::visit(
      [](const auto& m) {
        bool ok = true;
        if constexpr (requires { m.stream; }) ok = ok && in_range(m.stream);
        if constexpr (requires { m.extent; }) ok = ok && index(m.extent) < store::kMaxStreamExtents;
        if constexpr (requires { m.member; }) ok = ok && index(m.member) < store::kMaxMembers;
        if constexpr (requires { m.mode; })
          ok = ok && raw(m.mode) <= raw(store::Mode::kBsp) &&
               raw(m.pull) <= raw(store::PullMode::kBuffered);
        if constexpr (requires { m.rule; }) ok = ok && m.rule.is_valid();
        if constexpr (requires { m.code; }) ok = ok && raw(m.code) <= raw(StatusCode::kInternal);
        return ok;
      },
      message);
}

template <class Message>
Result<Message> decode_checked(std::span<const std::byte> bytes) {
  auto message =
      decode_any<Message>(bytes, std::make_index_sequence<std::variant_size_v<Message>>{});
  if (message.ok() && !in_range(*message))
    return Status{StatusCode::kInternal, "an id out of range in a message on the job's socket"};
  return message;
}

}  // namespace

std::vector<std::byte> encode(const ToServer& message) { return encode_any(message); }
std::vector<std::byte> encode(const ToWorker& message) { return encode_any(message); }

Result<ToServer> decode_to_server(std::span<const std::byte> bytes) {
  return decode_checked<ToServer>(bytes);
}
Result<ToWorker> decode_to_worker(std::span<const std::byte> bytes) {
  return decode_checked<ToWorker>(bytes);
}

}  // namespace psplus::wire
