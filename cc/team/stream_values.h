// Waits and writes of a stream itself, without a kernel: the driver's, found through the runtime, as nothing links its library.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace entwine::team {

// "" or why there are none.
std::string stream_values_unsupported();

// "" or what went wrong. `word` is the device's address of own or of pinned host memory.
std::string write_value(cudaStream_t stream, uint32_t* word, uint32_t value);
// What follows waits until the word, which only grows, has come to that.
std::string await_value(cudaStream_t stream, uint32_t const* word, uint32_t value);

}  // namespace entwine::team
