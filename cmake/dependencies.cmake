# The C++ libraries that come from the system. Each missing one stops the configure step with the
# command that installs it.

function(psplus_missing library package)
  message(
    FATAL_ERROR
      "psplus needs ${library}, which was not found.\n"
      "  Debian, Ubuntu: apt-get install ${package}\n"
      "  Elsewhere: install it and name its prefix with -DCMAKE_PREFIX_PATH=...")
endfunction()

# Compiled from their headers, so that neither the server nor the extension depends on a system
# library that the machine it is copied to may lack; each in one file, because its code takes longer
# to compile than most of ours.
find_path(PSPLUS_FMT_INCLUDE_DIR fmt/format.h DOC "Directory that holds fmt/format.h")
if(NOT PSPLUS_FMT_INCLUDE_DIR)
  psplus_missing("{fmt}" "libfmt-dev")
endif()
find_path(PSPLUS_SPDLOG_INCLUDE_DIR spdlog/spdlog.h DOC "Directory that holds spdlog/spdlog.h")
if(NOT PSPLUS_SPDLOG_INCLUDE_DIR)
  psplus_missing("spdlog" "libspdlog-dev")
endif()

add_library(psplus_formatting INTERFACE)
target_include_directories(psplus_formatting SYSTEM INTERFACE ${PSPLUS_FMT_INCLUDE_DIR})
add_library(psplus_logging INTERFACE)
target_include_directories(psplus_logging SYSTEM INTERFACE ${PSPLUS_SPDLOG_INCLUDE_DIR})
target_compile_definitions(psplus_logging INTERFACE FMT_HEADER_ONLY SPDLOG_HEADER_ONLY
                                                    SPDLOG_FMT_EXTERNAL)
target_link_libraries(psplus_logging INTERFACE psplus_formatting)

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

if(PSPLUS_BUILD_TESTS AND CMAKE_CROSSCOMPILING)
  add_subdirectory(/usr/src/googletest googletest EXCLUDE_FROM_ALL) # Debian's libgtest-dev
elseif(PSPLUS_BUILD_TESTS)
  find_package(GTest)
  if(NOT TARGET GTest::gmock)
    psplus_missing("GoogleTest with GoogleMock" "libgtest-dev libgmock-dev")
  endif()
endif()

if(PSPLUS_BUILD_BENCHMARKS)
  find_package(benchmark)
  if(NOT benchmark_FOUND)
    psplus_missing("Google Benchmark" "libbenchmark-dev")
  endif()
endif()
