# The Python extension psplus._C, built against the torch that setup.py names.
#
# find_package(Torch) is not used: with a CUDA build of torch it demands a CUDA toolkit, and it
# does not offer libtorch_python.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

if(NOT TORCH_INCLUDE_DIRS OR NOT IS_DIRECTORY "${TORCH_LIB_DIR}")
  message(FATAL_ERROR "PSPLUS_BUILD_PYTHON needs TORCH_INCLUDE_DIRS and TORCH_LIB_DIR; setup.py "
                      "sets them: pip install --no-build-isolation .")
endif()
foreach(library c10 torch_cpu torch torch_python)
  set(path "${TORCH_LIB_DIR}/lib${library}.so")
  if(NOT EXISTS "${path}")
    message(FATAL_ERROR "${path} does not exist; TORCH_LIB_DIR must be the lib folder of torch")
  endif()
  add_library(${library} SHARED IMPORTED)
  set_target_properties(${library} PROPERTIES IMPORTED_LOCATION "${path}")
endforeach()

Python_add_library(_C MODULE WITH_SOABI)
add_subdirectory(csrc/bindings)
add_subdirectory(csrc/c10d)
# First of all include directories: torch's own pybind11 is the only one whose types torch knows.
target_include_directories(_C SYSTEM BEFORE PRIVATE ${TORCH_INCLUDE_DIRS})
# torch brings a {fmt} of its own, whose arguments the core's cannot read.
target_sources(_C PRIVATE csrc/base/format.cpp)
set_source_files_properties(csrc/base/format.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_compile_options(_C PRIVATE -Wconversion)
target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C PSPLUS_VERSION="${PROJECT_VERSION}")
target_link_libraries(_C PRIVATE psplus_core psplus_options torch_python torch torch_cpu c10)
set_target_properties(
  _C
  # Of twenty seconds that a file takes to compile, torch's headers take most.
  PROPERTIES UNITY_BUILD ON
             UNITY_BUILD_BATCH_SIZE 6
             BUILD_RPATH "${TORCH_LIB_DIR}"
             INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib;${PSPLUS_PYTHON_RPATH}"
             # The static core stays private to the extension.
             LINK_OPTIONS "LINKER:--exclude-libs,ALL")
install(TARGETS _C LIBRARY DESTINATION psplus COMPONENT python)
