// A kernel that ends everything on its device with an error.
#pragma once

#include <cuda_runtime.h>

namespace entwine::team {

// Loads it on the current device: nothing can be loaded while kernels there wait.
cudaError_t load_trap();
// One thread, which fits beside kernels that fill the device.
cudaError_t launch_trap(cudaStream_t stream);

}  // namespace entwine::team
