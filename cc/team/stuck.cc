#include "team/stuck.h"

#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "schedule/geometry.h"

namespace entwine::team {
namespace {

void watch(schedule::StuckReport volatile* report) {
  while (report->written == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::fprintf(
      stderr,
      "entwine_jax.%s: rank %u waited too long for rank %u: row block %u, column %u, epoch %u, signal %u, wanted %u. Did every "
      "rank make the same calls in the same order? ENTWINE_TIMEOUT_S sets the bound.\n",
      report->op == static_cast<uint32_t>(schedule::Op::kAllGatherMatmul) ? "all_gather_matmul" : "matmul_reduce_scatter",
      report->rank, report->peer, report->row, report->col, report->epoch, report->seen, report->wanted);
  std::fflush(stderr);
}

schedule::StuckReport* make() {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, sizeof(schedule::StuckReport), cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess)
    return nullptr;
  std::memset(memory, 0, sizeof(schedule::StuckReport));
  auto* report = static_cast<schedule::StuckReport*>(memory);
  std::thread(watch, report).detach();  // after an error the process may end in any way; the thread touches nothing else
  return report;
}

}  // namespace

schedule::StuckReport* stuck_report() {
  static schedule::StuckReport* const report = make();
  return report;
}

}  // namespace entwine::team
