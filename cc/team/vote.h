// A vote of all ranks, so that one which fails alone doesn't leave the others in what comes next.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "team/nccl.h"

namespace entwine::team {

// Collective: `ok` becomes whether it was true on all ranks. "" or why they can't agree. Waits for the stream; `memory` is an
// int of the device's. What bounds the wait is around it: watch.h.
std::string vote(Nccl const& nccl, NcclComm communicator, cudaStream_t stream, int* memory, uint64_t timeout_ns, bool* ok);

}  // namespace entwine::team
