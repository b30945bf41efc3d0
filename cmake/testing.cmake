# Functions that declare C++ tests and benchmarks.

# psplus_add_test(<name> <source>... [THREADS] [TIMEOUT <seconds>] [LABEL <label>]
#                 [LIBRARIES <target>...])
#
# Builds the GoogleTest executable <name> and registers each of its tests as <name>.<suite>.<test>.
# TIMEOUT bounds one test (default 120; three times that under a sanitizer). LABEL is "slow" (left
# out by the quick run) or "heavy" (only in the full run). THREADS says that tests start threads:
# the thread sanitizer has nothing to say of the others, and its build leaves them out. Tests that
# start a server find it in PSPLUS_SERVER_EXECUTABLE.
function(psplus_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "THREADS" "TIMEOUT;LABEL" "LIBRARIES")
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
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_compile_options(${name} PRIVATE -Wconversion)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/cpp)
  target_compile_definitions(
    ${name} PRIVATE PSPLUS_SERVER_EXECUTABLE="$<TARGET_FILE:psplus-server>")
  target_link_libraries(${name} PRIVATE psplus_core psplus_options GTest::gtest_main GTest::gmock
                                        ${ARG_LIBRARIES})
  gtest_discover_tests(
    ${name}
    TEST_PREFIX "${name}."
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS ${ARG_LABEL})
endfunction()

# psplus_add_benchmark(<name> <source>... [LIBRARIES <target>...])
function(psplus_add_benchmark name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "" "LIBRARIES")
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_compile_options(${name} PRIVATE -Wconversion)
  target_link_libraries(${name} PRIVATE psplus_core psplus_options benchmark::benchmark
                                        ${ARG_LIBRARIES})
endfunction()
