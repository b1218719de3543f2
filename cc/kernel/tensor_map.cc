#include "kernel/tensor_map.h"

#include <cuda_runtime.h>

namespace entwine {

bool encode_tensor_map(TensorView const& view, CUtensorMap* map) {
  // Through the runtime, so that nothing links libcuda: the extension must load on machines without a driver.
  static auto const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
               : nullptr;
  }();
  if (encode == nullptr) return false;
  cuuint64_t size[4], pitch[3];
  cuuint32_t box[4], step[4] = {1, 1, 1, 1};
  for (uint32_t i = 0; i < view.rank; ++i) {
    size[i] = view.size[i];
    box[i] = view.box[i];
    if (i + 1 < view.rank) pitch[i] = view.pitch[i];
  }
  CUtensorMapDataType type = view.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                             : view.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return encode(map, type, view.rank, const_cast<void*>(view.data), size, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace entwine
