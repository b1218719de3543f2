# Each tests/cc/*.cc is one program, which passes by returning 0.
enable_testing()
file(GLOB test_sources CONFIGURE_DEPENDS tests/cc/*.cc)
foreach(source IN LISTS test_sources)
  cmake_path(GET source STEM name)
  add_executable(${name} "${source}")
  target_include_directories(${name} PRIVATE tests/cc)
  target_link_libraries(${name} PRIVATE entwine_host entwine_problem entwine_warnings)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT 300
    ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1;UBSAN_OPTIONS=print_stacktrace=1")
endforeach()
