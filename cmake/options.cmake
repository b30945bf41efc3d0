# How every target of ours is compiled. A target takes it by linking psplus_options; nothing here
# touches a global flag.

add_library(psplus_options INTERFACE)
target_compile_features(psplus_options INTERFACE cxx_std_20)
# A multiplication and a subtraction fused into one rounding would make results depend on the
# instruction set.
target_compile_options(psplus_options INTERFACE -Wall -Wextra -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  # g++ 12 sees an uninitialised string in every std::variant that can hold one.
  target_compile_options(psplus_options INTERFACE -Wno-maybe-uninitialized)
endif()
if(PSPLUS_WERROR)
  target_compile_options(psplus_options INTERFACE -Werror)
endif()

set(PSPLUS_SANITIZE_FLAGS "")
if(PSPLUS_SANITIZE STREQUAL "thread")
  set(PSPLUS_SANITIZE_FLAGS -fsanitize=thread)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ warns at every fence that this sanitizer does not model it. Code that relies on one takes
    # another path in such a build.
    target_compile_options(psplus_options INTERFACE -Wno-tsan)
  endif()
elseif(PSPLUS_SANITIZE STREQUAL "address")
  # Not vptr: it makes a pipe to look whether memory can be read, and takes its own lack of
  # descriptors, in tests that use all up, for a damaged object. Not null and object-size: what they
  # find the address sanitizer stops too, and they take long to compile.
  set(PSPLUS_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize=vptr,null,object-size
                            -fno-sanitize-recover=all)
elseif(PSPLUS_SANITIZE)
  message(FATAL_ERROR "PSPLUS_SANITIZE is '${PSPLUS_SANITIZE}'; it may be thread, address or empty")
endif()
if(PSPLUS_SANITIZE)
  # More optimisation makes compiling take longer than it makes the tests run shorter.
  target_compile_options(psplus_options INTERFACE ${PSPLUS_SANITIZE_FLAGS} -O1 -g1
                                                  -fno-omit-frame-pointer)
  target_link_options(psplus_options INTERFACE ${PSPLUS_SANITIZE_FLAGS})
endif()
