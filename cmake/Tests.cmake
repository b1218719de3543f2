# Each tests/cc/*.cc is one program, which passes by returning 0.
enable_testing()
file(GLOB test_sources CONFIGURE_DEPENDS tests/cc/*.cc)
# What a fuzz test looks at is nothing to threads.
set(fuzz_inputs 100000)
if(ENTWINE_SANITIZE STREQUAL "thread")
  set(fuzz_inputs 20000)
endif()
# Those that make no thread: ThreadSanitizer, which is slow, would find nothing in them.
set(without_threads arena_test element_test groups_test landing_protocol_test movers_protocol_test movers_test overdue_test
  packets_protocol_test problem_test protocol_test schedule_test signal_call_test simulate_test)
foreach(source IN LISTS test_sources)
  cmake_path(GET source STEM name)
  if(ENTWINE_SANITIZE STREQUAL "thread" AND name IN_LIST without_threads)
    continue()
  endif()
  add_executable(${name} "${source}")
  target_include_directories(${name} PRIVATE tests/cc)
  target_link_libraries(${name} PRIVATE entwine_host entwine_problem entwine_warnings)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT 300
    ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1;UBSAN_OPTIONS=print_stacktrace=1;ENTWINE_FUZZ_INPUTS=${fuzz_inputs}")
endforeach()

# nccl_test binds to stand-ins of two versions.
enable_language(C)
foreach(version 22705 22809)
  add_library(fake_nccl_${version} SHARED tests/cc/fake_nccl.c)
  target_compile_definitions(fake_nccl_${version} PRIVATE FAKE_NCCL_VERSION=${version})
  set_target_properties(fake_nccl_${version} PROPERTIES
    C_VISIBILITY_PRESET default OUTPUT_NAME nccl SUFFIX .so.2
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/fake_nccl/${version}")
  add_dependencies(nccl_test fake_nccl_${version})
endforeach()
target_sources(nccl_test PRIVATE cc/team/nccl.cc)
target_link_libraries(nccl_test PRIVATE ${CMAKE_DL_LIBS})
target_compile_definitions(nccl_test PRIVATE
  FAKE_NCCL_OLD="${CMAKE_CURRENT_BINARY_DIR}/fake_nccl/22705/libnccl.so.2"
  FAKE_NCCL_NEW="${CMAKE_CURRENT_BINARY_DIR}/fake_nccl/22809/libnccl.so.2")
