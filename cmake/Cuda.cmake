# Sets entwine_cuda, and where it is true makes the library entwine_cuda: kernels and peers.
#
# The kernels are Hopper's (wgmma, TMA), so they are built for sm_90a alone: `90a-real` is
# -gencode arch=compute_90a,code=sm_90a, while -arch=sm_90a would run a compute_90 pass too.
set(entwine_cuda FALSE)
if(NOT ENTWINE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "ENTWINE_CUDA=${ENTWINE_CUDA}: choose AUTO, ON or OFF")
endif()
if(ENTWINE_CUDA STREQUAL "OFF")
  message(STATUS "CUDA: off")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
elseif(NOT CMAKE_CUDA_COMPILER)
  find_program(entwine_nvcc nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(entwine_nvcc)
    set(CMAKE_CUDA_COMPILER "${entwine_nvcc}")
  elseif(ENTWINE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ENTWINE_CUDA=ON, but there is no nvcc: put it on PATH or set CUDACXX (scripts/find_nvcc.sh can fetch one)")
  else()
    message(STATUS "CUDA: off, no nvcc found")
    return()
  endif()
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# CMake's default for the runtime library is static, so that the wheel needs no toolkit; the driver library isn't linked at all.
find_package(CUDAToolkit 13.0 REQUIRED)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}")

# A library of its own, because nanobind gives its targets gcc options that nvcc doesn't know.
file(GLOB cuda_sources CONFIGURE_DEPENDS cc/team/*.cc cc/team/*.cu cc/kernel/*.cc cc/kernel/*.cu)
add_library(entwine_cuda STATIC ${cuda_sources})
target_include_directories(entwine_cuda PUBLIC cc)
target_link_libraries(entwine_cuda PUBLIC CUDA::cudart_static jaxlib_headers PRIVATE entwine_warnings)
if(ENTWINE_PTXAS_VERBOSE)
  target_compile_options(entwine_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
endif()
set(entwine_cuda TRUE)
