# entwine_jax._core: the handlers and the schedule for Python.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT)
find_package(nanobind CONFIG REQUIRED)

file(GLOB module_sources CONFIGURE_DEPENDS cc/python/*.cc)
nanobind_add_module(_core STABLE_ABI NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS
  ${module_sources}
  cc/ffi/cpu_handlers.cc)
target_link_libraries(_core PRIVATE entwine_host entwine_problem entwine_warnings)

if(entwine_cuda)
  target_sources(_core PRIVATE cc/ffi/cuda_handlers.cc cc/ffi/signal_handlers.cc cc/ffi/signal_streams.cc)
  target_compile_definitions(_core PRIVATE ENTWINE_WITH_CUDA)
  target_link_libraries(_core PRIVATE entwine_cuda)
endif()

install(TARGETS _core LIBRARY DESTINATION entwine_jax)
