#include "team/vote.h"

namespace entwine::team {
namespace {

// NCCL's numbers.
constexpr int kMin = 3, kInt32 = 2;

}  // namespace

std::string vote(Nccl const& nccl, NcclComm communicator, cudaStream_t stream, int* memory, uint64_t timeout_ns, bool* ok) {
  int mine = *ok ? 1 : 0;
  cudaError_t error = cudaMemcpyAsync(memory, &mine, sizeof mine, cudaMemcpyHostToDevice, stream);
  int returned = nccl.all_reduce(memory, memory, 1, kInt32, kMin, communicator, stream);
  std::string why = settled(nccl, communicator, "ncclAllReduce", returned, timeout_ns);
  if (error == cudaSuccess) error = cudaMemcpyAsync(&mine, memory, sizeof mine, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  *ok = mine == 1;
  if (why.empty() && error != cudaSuccess) why = cudaGetErrorString(error);
  return why.empty() ? "" : "the team can't agree: " + why;
}

}  // namespace entwine::team
