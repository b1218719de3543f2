// Bounded waits for peers.
#pragma once

#include "kernel/ptx/memory_order.cuh"
#include "kernel/sm90/config.cuh"

namespace entwine::sm90 {

__device__ __forceinline__ void write_report(schedule::StuckReport volatile* report, schedule::StuckReport const& what) {
  report->op = what.op;
  report->rank = what.rank;
  report->peer = what.peer;
  report->row = what.row;
  report->col = what.col;
  report->epoch = what.epoch;
  report->seen = what.seen;
  report->wanted = what.wanted;
  __threadfence_system();
  report->written = 1;
  __threadfence_system();
}

// After the report: others that wait are left the time for theirs.
__device__ __forceinline__ void end_kernel() {
  for (uint64_t start = ptx::nanoseconds(); ptx::nanoseconds() - start < 10'000'000;) __nanosleep(1000);
  __trap();
}

// Reports what is waited for and ends the kernel: JAX raises an error in place of a hang. Written out without printf or any
// other call, since a function call in the kernel makes ptxas serialise its wgmma instructions.
template <class Cta>
__device__ __forceinline__ void give_up(Cta const& cta, uint32_t peer, uint32_t row, uint32_t col, uint32_t seen,
                                        uint32_t wanted) {
  if (ptx::add_acquire_release(&cta.control()->stuck, 1) == 0)  // the first of this rank writes
    write_report(cta.params.stuck,
                 {0, static_cast<uint32_t>(Cta::kOp), cta.params.rank, peer, row, col, cta.epoch, seen, wanted});
  end_kernel();
}

// Until `peer` has signalled this call's value at `word`: acquires what it published, for generic reads and for this thread's
// TMA.
template <class Cta>
__device__ __forceinline__ void wait_for_peer(Cta const& cta, uint32_t const* word, uint32_t peer, uint32_t row, uint32_t col) {
  uint32_t wanted = schedule::signal_value(cta.epoch), seen = ptx::load_acquire_system(word);
  if (!schedule::signal_reached(seen, wanted)) {
    uint64_t start = ptx::nanoseconds();
    do {
      __nanosleep(20);
      seen = ptx::load_acquire_system(word);
      if (cta.params.timeout_ns != 0 && ptx::nanoseconds() - start > cta.params.timeout_ns)
        give_up(cta, peer, row, col, seen, wanted);
    } while (!schedule::signal_reached(seen, wanted));
  }
  ptx::fence_proxy_async_global();
}

}  // namespace entwine::sm90
