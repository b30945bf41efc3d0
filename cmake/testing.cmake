# Functions that declare C++ tests.

# Of tests' own code, which is compiled more often than it runs. To be linked after psplus_options,
# whose level it replaces.
add_library(psplus_test_options INTERFACE)
if(PSPLUS_SANITIZE)
  target_compile_options(psplus_test_options INTERFACE -O0 -g0)
else()
  target_compile_options(psplus_test_options INTERFACE -O1)
endif()

# What the tests' files include most, compiled once for all of them.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/test_headers.cpp CONTENT "")
add_library(psplus_test_headers OBJECT ${PROJECT_BINARY_DIR}/test_headers.cpp)
target_compile_options(psplus_test_headers PRIVATE -Wconversion)
target_link_libraries(psplus_test_headers PRIVATE psplus_core psplus_options psplus_test_options
                                                  GTest::gmock)
psplus_precompile(psplus_test_headers <gmock/gmock.h> <gtest/gtest.h> ${PSPLUS_STANDARD_HEADERS}
                  <fmt/core.h>)

# psplus_add_test(<name> <source>... [THREADS] [TIMEOUT <seconds>] [LABEL <label>]
#                 [PROCESSORS <number>] [LIBRARIES <target>...])
#
# Builds the GoogleTest executable <name> and registers each of its tests as <name>.<suite>.<test>.
# TIMEOUT bounds one test (default 120; three times that under a sanitizer). LABEL is "slow" (left
# out by the quick run) or "heavy" (only in the full run). PROCESSORS are what one test keeps busy.
# THREADS says that tests start threads: the thread sanitizer has nothing to say of the others, and
# its build leaves them out. Tests that start a server find it in PSPLUS_SERVER_EXECUTABLE.
function(psplus_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "THREADS" "TIMEOUT;LABEL;PROCESSORS" "LIBRARIES")
  if(PSPLUS_SANITIZE STREQUAL "thread" AND NOT ARG_THREADS)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(PSPLUS_SANITIZE)
    math(EXPR ARG_TIMEOUT "3 * ${ARG_TIMEOUT}")
  endif()
  if(NOT ARG_LABEL)
    set(ARG_LABEL "fast")
  endif()
  if(NOT ARG_PROCESSORS)
    set(ARG_PROCESSORS 1)
  endif()
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_compile_options(${name} PRIVATE -Wconversion)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/cpp)
  target_compile_definitions(
    ${name} PRIVATE PSPLUS_SERVER_EXECUTABLE="$<TARGET_FILE:psplus-server>")
  add_dependencies(${name} psplus-server)
  target_link_libraries(${name} PRIVATE psplus_core psplus_options psplus_test_options
                                        GTest::gtest_main GTest::gmock ${ARG_LIBRARIES})
  psplus_precompile(${name} REUSE psplus_test_headers)
  gtest_discover_tests(
    ${name}
    TEST_PREFIX "${name}."
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS ${ARG_LABEL} PROCESSORS ${ARG_PROCESSORS})
endfunction()

# psplus_mutate(<variable> <name> <source below csrc> (<old text> <new text>)...)
#
# Writes a copy of a production source with texts replaced and sets <variable> to its path, which
# ends like the source's: a program made of it is a mutant, which a test must notice. Production
# code has no switch for it. Stops the configure step when an old text is not in the source any
# more.
function(psplus_mutate variable name source)
  set(path ${PROJECT_SOURCE_DIR}/csrc/${source})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
  file(READ ${path} text)
  math(EXPR last "${ARGC} - 2")
  foreach(i RANGE 3 ${last} 2)
    math(EXPR j "${i} + 1")
    string(FIND "${text}" "${ARGV${i}}" at)
    if(at EQUAL -1)
      message(FATAL_ERROR "mutant ${name}: csrc/${source} has no such text:\n${ARGV${i}}")
    endif()
    string(REPLACE "${ARGV${i}}" "${ARGV${j}}" text "${text}")
  endforeach()
  set(changed ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}/${source})
  file(WRITE ${changed}.new "${text}")
  file(COPY_FILE ${changed}.new ${changed} ONLY_IF_DIFFERENT)
  set_source_files_properties(${changed} PROPERTIES COMPILE_OPTIONS "-w"
                                                    SKIP_PRECOMPILE_HEADERS ON)
  set(${variable} ${changed} PARENT_SCOPE)
endfunction()
