#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace psplus::wire {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

template <class T>
concept Scalar = std::integral<T> || std::floating_point<T> || std::is_enum_v<T>;

/// Appends little-endian values to a buffer.
class Writer {
 public:
  template <Scalar T>
  void put(T value) {
    std::memcpy(more(sizeof(T)), &value, sizeof(T));
  }
  void put_string(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    if (!text.empty()) std::memcpy(more(text.size()), text.data(), text.size());
  }
  [[nodiscard]] std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  // Neither insert() nor inlined: g++ 12 warns of an overflow that is none.
  [[gnu::noinline]] std::byte* more(std::size_t size) {
    bytes_.resize(bytes_.size() + size);
    return bytes_.data() + bytes_.size() - size;
  }
  std::vector<std::byte> bytes_;
};

/// Takes values from bytes that a peer sent. A read past the end yields zeros and makes `ok()`
/// false for good, so a decoder checks once, at its end, and never reads outside the buffer.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) noexcept : rest_(bytes) {}

  template <Scalar T>
  [[nodiscard]] T get() noexcept {
    T value{};
    if (const auto part = take(sizeof(T)); !part.empty())
      std::memcpy(&value, part.data(), sizeof(T));
    return value;
  }
  [[nodiscard]] std::string get_string() {
    const auto part = take(get<std::uint32_t>());
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }
  /// Whether `count` items of at least `item_bytes` can follow: to be asked before anything is
  /// allocated for them.
  [[nodiscard]] bool can_hold(std::uint64_t count, std::size_t item_bytes) noexcept {
    if (count > rest_.size() / item_bytes) ok_ = false;
    return ok_;
  }
  [[nodiscard]] bool ok() const noexcept { return ok_; }
  /// Everything was read and nothing was missing.
  [[nodiscard]] bool finished() const noexcept { return ok_ && rest_.empty(); }

 private:
  std::span<const std::byte> take(std::size_t size) noexcept {
    if (!ok_ || size > rest_.size()) {
      ok_ = false;
      return {};
    }
    const auto part = rest_.first(size);
    rest_ = rest_.subspan(size);
    return part;
  }
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

}  // namespace psplus::wire
