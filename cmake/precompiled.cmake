# Precompiled headers: most of the time that a file of ours takes to compile goes to what it
# includes. Files include what they use all the same; PSPLUS_PRECOMPILE=OFF compiles them so. Not for
# torch's headers: precompiled they are half a gigabyte, which takes as long to load as to parse.

set(PSPLUS_STANDARD_HEADERS
    <algorithm>
    <atomic>
    <chrono>
    <cmath>
    <cstdint>
    <cstring>
    <deque>
    <functional>
    <map>
    <memory>
    <mutex>
    <optional>
    <set>
    <span>
    <stdexcept>
    <string>
    <string_view>
    <thread>
    <utility>
    <variant>
    <vector>)

# psplus_precompile(<target> <header>... | REUSE <other target>)
function(psplus_precompile target)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "REUSE" "")
  if(NOT PSPLUS_PRECOMPILE)
    return()
  endif()
  if(ARG_REUSE)
    target_precompile_headers(${target} REUSE_FROM ${ARG_REUSE})
  else()
    target_precompile_headers(${target} PRIVATE ${ARG_UNPARSED_ARGUMENTS})
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(
      ${target}
      PRIVATE -fpch-preprocess # what ccache asks for
              # Warnings of what is inlined from the standard library, which are off where it is
              # included, but not where it comes precompiled.
              -Wno-array-bounds -Wno-stringop-overread -Wno-stringop-overflow -Wno-restrict)
  endif()
endfunction()
