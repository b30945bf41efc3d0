#pragma once

#include <fmt/core.h>
#include <string>
#include <utility>

/// \file Text with arguments, in {fmt}'s syntax. Everything else here takes its texts from this
/// file, so that {fmt}'s code is compiled once and not in every file that has an error message.

namespace psplus {

/// The text that `format` gives with `arguments`.
std::string vformatted(fmt::string_view format, fmt::format_args arguments);

/// The text that `format` gives with `arguments`; the compiler checks one against the other.
template <class... Args>
std::string formatted(fmt::format_string<Args...> format, Args&&... arguments) {
  if constexpr (requires { format.get(); })  // from {fmt} 10 on
    return vformatted(format.get(), fmt::make_format_args(arguments...));
  else
    return vformatted(format, fmt::make_format_args(arguments...));
}

/// The texts of `items`, numbers or strings, with `separator` between them.
template <class Items>
std::string joined(const Items& items, const char* separator) {
  std::string text;
  const char* between = "";
  for (const auto& item : items) {
    text += formatted("{}{}", between, item);
    between = separator;
  }
  return text;
}

}  // namespace psplus
