// What the simulation knows of a machine: microseconds, and bytes a microsecond (1e3 of these are a GB/s). All numbers are of
// two H200s (NVLink, 18 links a GPU) and of the kernels that docs/design.md describes. Most were measured by themselves. Those
// that say so are fitted to whole calls, benchmarks/results/h200x2.json, and python -m benchmarks.model tells how well.
#pragma once

#include "schedule/cost.h"

namespace entwine::simulate {

struct Machine {
  // What a full wave of 256 x 256 tiles multiplies at (other tiles scale with it: schedule/cost.h), and the average over a
  // whole call that the power limit allows, call after call, of random numbers. Fitted: the ten shapes.
  double flops_per_us = 790e6, sustained_flops_per_us = 660e6;

  // One direction of one GPU's link, whatever the number of peers: TMA stores, with 8 CTAs and more; TMA loads, with 16; and
  // either from one cluster's two CTAs.
  double link_bytes_per_us = 361e3, fetch_bytes_per_us = 335e3, cluster_bytes_per_us = 92e3;
  // From a store's last byte to its producer's knowing that it has landed: the time that a tile takes on the link where the
  // window is four or six of them, less its bytes'. Then until the signal is seen, and the way of a fetch there and back: the
  // first row block of a call that waits.
  double land_us = 1, signal_us = 1, fetch_us = 2;
  // A pusher, which is one thread; what it claims at once (kernel/sm90/shape.h, kUnitBytes); and how much longer its cluster's
  // tiles take meanwhile: with 66 of them 8 to 17 %.
  double mover_bytes_per_us = schedule::cost::kMoverBytesPerUs;  // of strategy "resident"
  double pusher_bytes_per_us = 16e3, unit_bytes = 98304, pushing_slower = 1.1;

  // From the end of a call to the first load of the next, and from the last store to the end (fitted: calls of few tiles).
  double launch_us = 6.5;
  // A tile's first load where nothing hides it; an image's way to memory, or from there (traces of tiles). An image's way
  // through a collector (fitted: all-reduce of small tiles).
  double load_us = 1.2, store_us = 1, collect_us = 1.3;
  // Clusters aren't in step: a tile takes so much longer or shorter, evenly spread (traces of tiles).
  double jitter = 0.03;
  // What adding a partial sum takes beyond a tile's usual end.
  double add_us = 1;
  // Few rows: launch, prologue and both exchanges' latencies, in place of schedule/cost.h's (fitted: 8 to 128 rows).
  double few_rows_us = 9.5;

  // XLA, fitted: cuBLAS' rate beside collectives, at the clocks that these leave it, and its launch; memory; NCCL between two
  // ranks, of which all-gather and reduce-scatter take the better of two ways, for little and for much; and what launching both
  // costs the host, which is all that calls of up to 128 rows take, one after the other (from idle it is 57).
  double gemm_flops_per_us = 655e6, gemm_us = 7, memory_bytes_per_us = 3.7e6;
  double nccl_us = 18, nccl_bytes_per_us = 206e3, nccl_long_us = 46, nccl_long_bytes_per_us = 258e3;
  double nccl_all_reduce_bytes_per_us = 289e3, host_us = 36;
};

// Calls `visit(name, number)` for each of them.
template <class Visit>
void for_each_number(Machine& m, Visit visit) {
  visit("flops_per_us", m.flops_per_us);
  visit("sustained_flops_per_us", m.sustained_flops_per_us);
  visit("link_bytes_per_us", m.link_bytes_per_us);
  visit("fetch_bytes_per_us", m.fetch_bytes_per_us);
  visit("cluster_bytes_per_us", m.cluster_bytes_per_us);
  visit("land_us", m.land_us);
  visit("signal_us", m.signal_us);
  visit("fetch_us", m.fetch_us);
  visit("pusher_bytes_per_us", m.pusher_bytes_per_us);
  visit("mover_bytes_per_us", m.mover_bytes_per_us);
  visit("unit_bytes", m.unit_bytes);
  visit("pushing_slower", m.pushing_slower);
  visit("launch_us", m.launch_us);
  visit("load_us", m.load_us);
  visit("store_us", m.store_us);
  visit("collect_us", m.collect_us);
  visit("jitter", m.jitter);
  visit("add_us", m.add_us);
  visit("few_rows_us", m.few_rows_us);
  visit("gemm_flops_per_us", m.gemm_flops_per_us);
  visit("gemm_us", m.gemm_us);
  visit("memory_bytes_per_us", m.memory_bytes_per_us);
  visit("nccl_bytes_per_us", m.nccl_bytes_per_us);
  visit("nccl_all_reduce_bytes_per_us", m.nccl_all_reduce_bytes_per_us);
  visit("nccl_us", m.nccl_us);
  visit("nccl_long_us", m.nccl_long_us);
  visit("nccl_long_bytes_per_us", m.nccl_long_bytes_per_us);
  visit("host_us", m.host_us);
}

}  // namespace entwine::simulate
