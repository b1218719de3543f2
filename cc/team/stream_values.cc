#include "team/stream_values.h"

#include <cuda.h>

namespace entwine::team {
namespace {

using ValueFunction = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

ValueFunction value_function(char const* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<ValueFunction>(found) : nullptr;
}
ValueFunction waits() {
  static ValueFunction const function = value_function("cuStreamWaitValue32");
  return function;
}
ValueFunction writes() {
  static ValueFunction const function = value_function("cuStreamWriteValue32");
  return function;
}

std::string said(char const* what, CUresult result) {
  return result == CUDA_SUCCESS ? "" : std::string(what) + ": CUDA error " + std::to_string(static_cast<int>(result));
}

}  // namespace

std::string stream_values_unsupported() {
  if (waits() != nullptr && writes() != nullptr) return "";
  return "the driver has no cuStreamWaitValue32 and cuStreamWriteValue32: update it, or pass strategy=\"xla\"";
}

std::string write_value(cudaStream_t stream, uint32_t* word, uint32_t value) {
  return said("cuStreamWriteValue32",
              writes()(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

std::string await_value(cudaStream_t stream, uint32_t const* word, uint32_t value) {
  return said("cuStreamWaitValue32", waits()(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WAIT_VALUE_GEQ));
}

}  // namespace entwine::team
