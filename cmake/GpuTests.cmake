# teams_test runs the kernels without JAX; what it prints and its exit status: tests/gpu/cc/teams_test.cu.
if(NOT entwine_cuda)
  message(FATAL_ERROR "ENTWINE_GPU_TESTS=ON needs ENTWINE_CUDA=ON")
endif()
add_executable(teams_test tests/gpu/cc/teams_test.cu tests/gpu/cc/several_products.cu tests/gpu/cc/emulated_team.cc)
target_link_libraries(teams_test PRIVATE entwine_cuda entwine_warnings)
# The matmul alone against cuBLAS, which it loads at run time.
add_executable(gemm benchmarks/gemm.cu)
target_link_libraries(gemm PRIVATE entwine_cuda entwine_warnings ${CMAKE_DL_LIBS})
