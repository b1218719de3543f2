#include "team/stuck.h"

#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "schedule/geometry.h"

namespace entwine::team {
namespace {

void watch(schedule::StuckReport volatile* report) {
  while (report->written == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::string what = report->col == schedule::kGroupColumn
                         ? "group " + std::to_string(report->row)
                         : "row block " + std::to_string(report->row) + ", column " + std::to_string(report->col);
  std::fprintf(stderr,
               "entwine_jax.%s: rank %u waited too long for rank %u: %s, epoch %u, signal %u, wanted %u. Did every rank make "
               "the same calls in the same order? ENTWINE_TIMEOUT_S sets the bound.\n",
               schedule::op_name(static_cast<schedule::Op>(report->op)), report->rank, report->peer, what.c_str(),
               report->epoch, report->seen, report->wanted);
  std::fflush(stderr);
}

schedule::StuckReport* make() {
  // A page of the process's own, only registered with CUDA: at exit it stays readable for the thread, however CUDA unwinds.
  constexpr size_t kPage = 4096;
  void* page = std::aligned_alloc(kPage, kPage);
  void* mapped = nullptr;
  if (page == nullptr || cudaHostRegister(page, kPage, cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess ||
      cudaHostGetDevicePointer(&mapped, page, 0) != cudaSuccess)
    return nullptr;
  std::memset(page, 0, kPage);
  std::thread(watch, static_cast<schedule::StuckReport*>(page)).detach();
  return static_cast<schedule::StuckReport*>(mapped);
}

}  // namespace

schedule::StuckReport* stuck_report() {
  static schedule::StuckReport* const report = make();
  return report;
}

}  // namespace entwine::team
