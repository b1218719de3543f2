// What a launch hands the kernel, filled in by the host.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernel/sm90/epilogue.h"
#include "schedule/gathering.h"
#include "schedule/movers.h"
#include "schedule/products.h"
#include "schedule/stuck_report.h"
#include "schedule/trace_event.h"

namespace entwine::sm90 {

// The head of an arena, in device memory so that replayed CUDA graphs see it change. Zeroed once. `queue` is the epoch above
// the claims of this launch, in one word so that a cluster's first claim also tells it the epoch; every launch leaves it at
// {epoch + 1, 0}. The other counters are used by parity of the epoch; a launch clears the next one's.
struct Control {
  uint64_t queue;
  uint32_t push[2];  // units of what is gathered that are claimed to be pushed; all-reduce: parts claimed by collectors
  struct alignas(8) Counts {
    // Partial sums by push: parts of remote tiles that lie at their owner's. Strategy "resident": jobs claimed by movers.
    uint32_t landed;
    uint32_t copied;  // units of the peers' chunks that are claimed to be copied to the gathered result
  } counts[2];        // cleared as one word
  uint32_t stuck;
};

// What is gathered beside the matmul: x (all-gather), or some other array (reduce-scatter, if `own` isn't null).
struct Gather {
  schedule::Gathering shape;
  uint8_t const* own;        // this rank's chunk
  uint8_t* whole;            // all chunks, a result; null if it isn't wanted
  uint32_t pushers;          // clusters whose idle warp pushes the own chunk
  uint32_t copiers;          // clusters whose idle warp copies the peers' chunks to `whole`
  uint32_t units_per_block;  // units in a full row block
  uint32_t first_word;       // signal word of a source's first row block
  uint64_t staging_offset;   // of the peers' chunks in a half of the staging
};

struct Params {
  // By product: x, of which all-gather has one; w; y, of which the others have one. And all-gather's peers' chunks of x by
  // epoch parity. Coordinates: see loader.cuh and storer.cuh.
  CUtensorMap x[schedule::kMaxProducts], gathered[2], w[schedule::kMaxProducts], y[schedule::kMaxProducts];
  schedule::Beginnings begin;  // in column tiles (all-gather) or k blocks

  schedule::Raster raster;  // of one chunk, in cluster tiles
  uint32_t ranks, rank;
  uint32_t row_blocks;  // row blocks of a chunk in one batch
  uint32_t k_blocks;    // of 128 bytes
  uint32_t clusters;    // launched
  uint32_t last;        // the position of the launch's last claim: every cluster's last one finds no tile

  uint32_t lead;  // reduce-scatter, all-reduce
  uint32_t pull;  // reduce-scatter, all-reduce: partials wait in their producer's arena, not in the owner's

  uint32_t m_shard;                    // rows of a chunk
  uint32_t transposed_x;               // x is stored (batch, k, rows): loader.cuh
  uint32_t rows;                       // all-reduce: of y
  uint32_t n[schedule::kMaxProducts];  // of each y
  uint64_t results_offset;             // all-reduce: where the peers' finished tiles begin in a half of the staging

  uint32_t pushers;  // reduce-scatter, all-reduce by push: tiles on the link at once

  schedule::Movers movers;   // strategy "resident": clusters that move. Then `pull` is set
  uint64_t outgoing_offset;  // reduce-scatter, all-reduce: where what they have yet to take begins in a half of the staging
  Gather gather;

  uint8_t* arena[schedule::kMaxRanks];  // every rank's, mapped here
  uint64_t arrivals_offset, signals_offset, staging_offset, staging_half;
  uint32_t words_per_source;

  uint64_t timeout_ns;  // of any one wait for a peer; 0: none
  schedule::StuckReport* stuck;

  schedule::TraceEvent* trace;  // traced kernels: [CTA][writer][trace_capacity], zeroed
  uint32_t trace_capacity;

  Epilogue epilogue[schedule::kMaxProducts];  // of each y
  float const* scale;  // 8-bit operands: of each product of an all-gather, else of the sum; before that is rounded
  uint32_t gated;      // two products, one y: schedule/products.h

  ENTWINE_HOST_DEVICE uint32_t last_claim() const { return last; }
};

}  // namespace entwine::sm90
