# teams_test runs the kernels without JAX; what it prints and its exit status: tests/gpu/cc/teams_test.cc.
if(NOT entwine_cuda)
  message(FATAL_ERROR "ENTWINE_GPU_TESTS=ON needs ENTWINE_CUDA=ON")
endif()
file(GLOB teams_test_sources CONFIGURE_DEPENDS tests/gpu/cc/*.cc tests/gpu/cc/*.cu)
add_executable(teams_test ${teams_test_sources})
target_link_libraries(teams_test PRIVATE entwine_cuda entwine_warnings)
# The matmul alone against cuBLAS, which it loads at run time.
add_executable(gemm benchmarks/gemm.cu)
target_link_libraries(gemm PRIVATE entwine_cuda entwine_warnings ${CMAKE_DL_LIBS})
