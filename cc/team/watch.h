// Bounds what NCCL waits for, which NCCL doesn't.
//
// begin() and end() have a stream write a number into pinned host memory, before what NCCL does on it and behind that. A thread
// reads it ten times a second. What is under way for longer than its bound is reported as a kernel's own wait would be, and a
// kernel that traps ends all that the device runs: JAX raises an error in place of a hang, and nothing comes out as valid.
// Until then the thread calls nothing of CUDA, so it disturbs no capture of a graph.
//
// Only time in which this process runs counts: one that was stopped gives its peers the whole bound again.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "team/overdue.h"

namespace entwine::team {

// Of one stream, on which one thread at a time enqueues. Never destroyed once it has started, as the thread reads it. Functions
// return "", or what went wrong.
class Watch {
 public:
  // Allocates and loads all that is needed later, on the current device, which is `rank` of a team of `ranks`.
  std::string start(int device, int rank, int ranks);

  // What the stream does from here on is `what` ("group 3, epoch 7"); until end(), which may come once more.
  std::string begin(cudaStream_t stream, Patience const& patience, std::string what);
  std::string end(cudaStream_t stream);

  // The thread's part, after `milliseconds` in which this process ran.
  void look(uint64_t milliseconds);

 private:
  void give_up(Overdue::Awaited const& awaited);

  int device_ = 0, rank_ = 0, ranks_ = 0;
  uint32_t const volatile* at_ = nullptr;  // on the host; the next is the same word for the device
  uint32_t* written_ = nullptr;
  cudaStream_t trapped_ = nullptr;
  Overdue overdue_;
};

}  // namespace entwine::team
