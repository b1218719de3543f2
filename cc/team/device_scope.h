// XLA runs a device's stages on any of its threads.
#pragma once

#include <cuda_runtime.h>

namespace entwine::team {

// Makes a device the current one.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~DeviceScope() { cudaSetDevice(before_); }
  DeviceScope(DeviceScope const&) = delete;
  DeviceScope& operator=(DeviceScope const&) = delete;

 private:
  int before_ = 0;
};

}  // namespace entwine::team
