// The kernel for few rows (decode). schedule/few_rows.h says how the work is cut.
//
//   warp 0       loader      streams its slice of w's columns, and x's rows beside it; of both CTAs nobody else's
//   warps 1-3                wait for the end
//   warps 4-11   consumers   all-gather: first they copy the own chunk of x to every rank's staging. Then wgmma with w as the
//   left
//                            operand, so that 64 of its columns meet any number of rows: y^T = w^T x^T
//
// After the last k block the CTAs of a cluster trade float32 sums through each other's shared memory, where the stages were:
// each finishes one portion of the rows for all 128 columns, adding slices in their order. Reduce-scatter and all-reduce then
// store rounded sums to the peers that need them, signal, wait for theirs, and add in rank order.
//
// Memory order. Copies of x and sums travel by generic stores; after them a barrier of the consumers, then one thread's system
// fence and st.release.sys (all-gather: through an arrival counter, acq_rel). x is read by TMA, so its writers fence the
// asynchronous proxy, and so does the loader after it acquired the signal. Sums are read past L1.
//
// Why it can't deadlock. Copying x waits for nobody, and a CTA copies until there is nothing left to claim before it waits for
// anyone; one resident cluster copies all. Tiles are claimed in order; a cluster stores and signals its sums of a tile before
// it waits for the peers' sums of the same tile. So the lowest tile at which any rank waits has been claimed by every rank that
// is to signal it, or will be, by a cluster that waits at no lower tile. Waits inside a cluster are barriers that all its
// threads reach.
#pragma once

#include "kernel/ptx/cluster.cuh"
#include "kernel/ptx/matrix.cuh"
#include "kernel/ptx/mbarrier.cuh"
#include "kernel/ptx/memory_order.cuh"
#include "kernel/ptx/tma.cuh"
#include "kernel/ptx/wgmma.cuh"
#include "kernel/sm90/few_rows_params.h"
#include "kernel/sm90/scheduler.cuh"
#include "kernel/sm90/shape.h"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

template <schedule::Op kOp_, uint32_t kRows_, bool kTransposedW_, typename Out_>
struct FewRowsConfig {
  static constexpr schedule::Op kOp = kOp_;
  static constexpr bool kGather = kOp == schedule::Op::kAllGatherMatmul, kScatter = kOp == schedule::Op::kMatmulReduceScatter;
  static constexpr uint32_t kRows = kRows_;  // room for them
  static constexpr bool kTransposedW = kTransposedW_;
  using Out = Out_;
  static constexpr bool kFloatOut = sizeof(Out) == 4;

  static constexpr uint32_t kTileN = schedule::kFewRowsTileN, kConsumerThreads = kConsumers * 128;
  static constexpr uint32_t kWBytes = kTileN * kBlockK * 2, kXBytes = kRows * kBlockK * 2, kStageBytes = kWBytes + kXBytes;
  static constexpr uint32_t kStages = kRows == 16 ? 10 : kRows == 64 ? 8 : 6;
  // Sums of one row and one slice; the padding spreads rows over the banks.
  static constexpr uint32_t kSumPitch = (kTileN + 4) * 4;
  static_assert(kRows * kSumPitch <= kStages * kStageBytes, "sums take the place of the stages");

  static constexpr uint32_t kBarriers = kStages * kStageBytes, kClaim = kBarriers + 16 * kStages;
  static constexpr uint32_t kAllocated = kClaim + 16 + 1024;  // room to align the base
  static_assert(kAllocated <= kSharedLimit, "shared memory of one CTA");
};

template <class C>
struct FewRowsCta {
  static constexpr schedule::Op kOp = C::kOp;
  FewRowsParams const& params;
  uint32_t base;   // of shared memory
  uint32_t slice;  // rank in the cluster
  uint32_t epoch;

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return base + C::kBarriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return base + C::kBarriers + 8 * (C::kStages + stage); }
  __device__ __forceinline__ uint32_t w(uint32_t stage) const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ uint32_t x(uint32_t stage) const { return w(stage) + C::kWBytes; }
  // {tile, unit}: what has been claimed for all threads to see.
  __device__ __forceinline__ uint32_t claimed_tile() const { return base + C::kClaim; }
  __device__ __forceinline__ uint32_t claimed_unit() const { return base + C::kClaim + 8; }

  __device__ __forceinline__ uint32_t parity() const { return epoch & 1; }
  __device__ __forceinline__ Control* control() const { return reinterpret_cast<Control*>(params.arena[params.rank]); }
  __device__ __forceinline__ uint8_t* staging(uint32_t rank) const {
    return params.arena[rank] + params.staging_offset + parity() * params.staging_half;
  }
  __device__ __forceinline__ uint32_t* signal(uint32_t destination, uint32_t source, uint32_t index) const {
    return reinterpret_cast<uint32_t*>(params.arena[destination] + params.signals_offset) +
           schedule::signal_word(source, params.words_per_source, index);
  }
  __device__ __forceinline__ uint32_t first_block() const { return slice * params.slice_blocks; }
  __device__ __forceinline__ uint32_t blocks() const {
    uint32_t first = first_block();
    return first >= params.k_blocks ? 0 : schedule::smaller(params.slice_blocks, params.k_blocks - first);
  }
};

// --------------------------------------------------------------------------------------------------------------- loader

template <class C>
__device__ __forceinline__ void load_w(FewRowsCta<C> const& cta, uint32_t tile, uint32_t block, uint32_t stage) {
  uint32_t k = (cta.first_block() + block) * kBlockK, n = tile * C::kTileN;
  ptx::mbarrier_arrive_expect(cta.full(stage), C::kStageBytes);
  if constexpr (C::kTransposedW) {
    ptx::tma_load_2d(&cta.params.w, cta.w(stage), cta.full(stage), k, n);
  } else {
    for (uint32_t panel = 0; panel < C::kTileN / 64; ++panel)
      ptx::tma_load_2d(&cta.params.w, cta.w(stage) + panel * kImageBytes, cta.full(stage), n + panel * 64, k);
  }
}

template <class C>
__device__ __forceinline__ void load_x(FewRowsCta<C> const& cta, uint32_t block, uint32_t stage) {
  ptx::tma_load_2d(&cta.params.x[C::kGather ? cta.parity() : 0], cta.x(stage), cta.full(stage),
                   (cta.first_block() + block) * kBlockK, 0);
}

// w needs no peer: the stages fill with it while x is on its way.
template <class C>
class FewRowsLoader {
 public:
  __device__ __forceinline__ explicit FewRowsLoader(FewRowsCta<C> const& cta) : cta_(cta) {}

  __device__ __forceinline__ void load(uint32_t tile) {
    uint32_t blocks = cta_.blocks(), ahead = schedule::smaller(blocks, C::kStages), stage = stage_, phase = phase_;
    for (uint32_t block = 0; block < ahead; ++block) {
      ptx::mbarrier_wait(cta_.empty(stage), phase);
      load_w(cta_, tile, block, stage);
      next(stage, phase);
    }
    if constexpr (C::kGather) {
      if (!gathered_) {
        for (uint32_t source = 0; source < cta_.params.shape.ranks; ++source)
          wait_for_peer(cta_, cta_.signal(cta_.params.rank, source, cta_.slice), source, cta_.slice, 0);
        gathered_ = true;
      }
    }
    for (uint32_t block = 0; block < blocks; ++block) {
      if (block >= ahead) {
        ptx::mbarrier_wait(cta_.empty(stage_), phase_);
        load_w(cta_, tile, block, stage_);
      }
      load_x(cta_, block, stage_);
      next(stage_, phase_);
    }
  }

 private:
  static __device__ __forceinline__ void next(uint32_t& stage, uint32_t& phase) {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  FewRowsCta<C> const& cta_;
  uint32_t stage_ = 0, phase_ = 1;
  bool gathered_ = false;
};

// ------------------------------------------------------------------------------------------------------------ consumers

template <class C>
class FewRowsConsumer {
 public:
  __device__ __forceinline__ FewRowsConsumer(FewRowsCta<C> const& cta, uint32_t thread)
      : cta_(cta), thread_(thread), portion_(31 - __clz(C::kRows / cta.params.shape.slices)) {}

  // All-gather: claims units (slice, piece) of the own chunk and copies them to every rank's staging, the own one too.
  __device__ __forceinline__ void gather() {
    FewRowsParams const& p = cta_.params;
    uint32_t pieces = p.clusters, units = p.shape.slices * pieces;
    for (;;) {
      if (thread_ == 0) ptx::store_shared(cta_.claimed_unit(), ptx::add_relaxed(&cta_.control()->push[cta_.parity()], 1));
      sync();
      uint32_t unit = ptx::load_shared(cta_.claimed_unit());
      if (unit >= units) return;
      uint32_t slice = unit % p.shape.slices, piece = unit / p.shape.slices;
      copy(slice, piece, pieces);
      ptx::fence_proxy_async_global();
      sync();
      if (thread_ < p.shape.ranks) {  // each destination has its own counter and signal
        __threadfence_system();
        uint32_t* arrivals = reinterpret_cast<uint32_t*>(p.arena[p.rank] + p.arrivals_offset) +
                             schedule::signal_word(thread_, p.words_per_source, slice);
        if (ptx::add_acquire_release(arrivals, 1) == pieces - 1) {
          ptx::store_relaxed(arrivals, 0);
          ptx::store_release_system(cta_.signal(thread_, p.rank, slice), schedule::signal_value(cta_.epoch));
        }
      }
    }
  }

  __device__ __forceinline__ void multiply() {
    // A slice may be empty. (And what is set here need not live through the rest of a tile.)
#pragma unroll
    for (float& value : acc_) value = 0;
    uint32_t blocks = cta_.blocks();
    for (uint32_t block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(cta_.full(stage_), phase_);
      uint64_t w =
          ptx::wgmma_descriptor(cta_.w(stage_) + thread_ / 128 * 64 * kBlockK * 2, C::kTransposedW ? 16 : kImageBytes, 1024);
      uint64_t x = ptx::wgmma_descriptor(cta_.x(stage_), 16, 1024);
      pin();
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < static_cast<int>(kBlockK) / 16; ++i)
        ptx::wgmma_k16<0, C::kTransposedW ? 0 : 1>(acc_, w + i * ((C::kTransposedW ? 32 : 2048) >> 4), x + i * (32 >> 4), true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      pin();
      if (thread_ % 32 == 0) ptx::mbarrier_arrive(cta_.empty(stage_));
      if (++stage_ == C::kStages) {
        stage_ = 0;
        phase_ ^= 1;
      }
    }
  }

  // Hands each portion's rows to the CTA that finishes it.
  __device__ __forceinline__ void trade() {
    uint32_t column = thread_ / 32 * 16 + thread_ % 32 / 4, first = thread_ % 4 * 2;
#pragma unroll
    for (uint32_t j = 0; j < C::kRows / 8; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        uint32_t row = j * 8 + first + e;
        if (row >= cta_.params.shape.rows) continue;
        uint32_t portion = row >> portion_, local = row & (portion_rows() - 1);
        uint32_t at = sum(cta_.slice, local, column);
        ptx::store_shared_at_cta(at, portion, acc_[j * 4 + e]);
        ptx::store_shared_at_cta(at + 8 * 4, portion, acc_[j * 4 + 2 + e]);
      }
  }

  // Rows of this CTA's portion: rounds, exchanges with peers, stores y.
  __device__ __forceinline__ void finish(uint32_t tile) {
    FewRowsParams const& p = cta_.params;
    if constexpr (C::kGather) {
      each_row(tile, [&](uint32_t row, uint32_t column, float4 v) { store(p.y, y_row(row), column, v); });
    } else {
      each_row(tile, [&](uint32_t row, uint32_t column, float4 v) {
        if constexpr (C::kScatter) {
          uint32_t owner = row / p.shape.m_shard % p.shape.ranks;
          if (owner != p.rank) store(cta_.staging(owner), slot(owner, p.rank) + y_row(row), column, v);
        } else {
          for (uint32_t peer = 0; peer < p.shape.ranks; ++peer)
            if (peer != p.rank) store(cta_.staging(peer), slot(peer, p.rank) + row, column, v);
        }
      });
      sync();
      uint32_t word = tile * p.shape.slices + cta_.slice;
      if (thread_ < p.shape.ranks && thread_ != p.rank) {
        __threadfence_system();
        ptx::store_release_system(cta_.signal(thread_, p.rank, word), schedule::signal_value(cta_.epoch));
        wait_for_peer(cta_, cta_.signal(p.rank, thread_, word), thread_, cta_.slice, tile);
      }
      sync();
      each_row(tile, [&](uint32_t row, uint32_t column, float4 own) {
        if constexpr (C::kScatter) {
          if (row / p.shape.m_shard % p.shape.ranks != p.rank) return;
        } else {
          own = rounded(own);  // what the peers add, so that all get the same bits
        }
        float4 total = make_float4(0, 0, 0, 0);
        for (uint32_t source = 0; source < p.shape.ranks; ++source) {
          float4 v = own;
          if (source != p.rank) v = load(cta_.staging(p.rank), slot(p.rank, source) + (C::kScatter ? y_row(row) : row), column);
          total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
        }
        store(p.y, C::kScatter ? y_row(row) : row, column, total);
      });
    }
  }

 private:
  static __device__ __forceinline__ void sync() { ptx::barrier_sync(1, C::kConsumerThreads); }
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (float& value : acc_) asm volatile("" : "+f"(value)::"memory");
  }

  __device__ __forceinline__ uint32_t portion_rows() const { return 1u << portion_; }
  // Where slice `slice` leaves its sums of one row of this CTA's portion.
  __device__ __forceinline__ uint32_t sum(uint32_t slice, uint32_t local, uint32_t column) const {
    return cta_.base + (slice * portion_rows() + local) * C::kSumPitch + column * 4;
  }

  // A share of the threads for each row, four columns a thread: use(row, column of n, the slices' sum).
  template <class Use>
  __device__ __forceinline__ void each_row(uint32_t tile, Use use) const {
    FewRowsParams const& p = cta_.params;
    constexpr uint32_t kAcross = C::kTileN / 4;
    uint32_t in_tile = thread_ % kAcross * 4, column = tile * C::kTileN + in_tile;
    if (column >= p.shape.n) return;  // n is a multiple of 4
    for (uint32_t local = thread_ / kAcross; local < portion_rows(); local += C::kConsumerThreads / kAcross) {
      uint32_t row = cta_.slice * portion_rows() + local;
      if (row >= p.shape.rows) return;
      float4 total = ptx::load_shared_f32x4(sum(0, local, in_tile));
      for (uint32_t slice = 1; slice < p.shape.slices; ++slice) {
        float4 v = ptx::load_shared_f32x4(sum(slice, local, in_tile));
        total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
      }
      use(row, column, total);
    }
  }

  // All-gather: rows are (chunk, batch, row), y's are (batch, chunk, row). Reduce-scatter: rows are (batch, chunk, row), y's
  // and staging's (batch, row).
  __device__ __forceinline__ uint32_t y_row(uint32_t row) const {
    schedule::FewRows const& s = cta_.params.shape;
    if constexpr (C::kGather) {
      uint32_t chunk = row / s.chunk_rows, rest = row - chunk * s.chunk_rows, batch = rest / s.m_shard;
      return (batch * s.ranks + chunk) * s.m_shard + (rest - batch * s.m_shard);
    } else {
      uint32_t block = row / s.m_shard;
      return block / s.ranks * s.m_shard + (row - block * s.m_shard);
    }
  }
  // First row of a source's part of a rank's staging.
  __device__ __forceinline__ uint32_t slot(uint32_t keeper, uint32_t source) const {
    schedule::FewRows const& s = cta_.params.shape;
    return schedule::peer_slot(keeper, source) * (C::kScatter ? s.chunk_rows : s.rows);
  }

  __device__ __forceinline__ uint64_t offset(uint32_t row, uint32_t column) const {
    return (uint64_t(row) * cta_.params.shape.n + column) * sizeof(typename C::Out);
  }
  __device__ __forceinline__ void store(uint8_t* to, uint32_t row, uint32_t column, float4 v) const {
    if constexpr (C::kFloatOut)
      *reinterpret_cast<float4*>(to + offset(row, column)) = v;
    else
      *reinterpret_cast<uint2*>(to + offset(row, column)) = make_uint2(ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w));
  }
  static __device__ __forceinline__ float4 unpacked(uint2 bits) {
    return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
                       __uint_as_float(bits.y & 0xffff0000u));
  }
  // What a peer has written; not from L1.
  __device__ __forceinline__ float4 load(uint8_t const* from, uint32_t row, uint32_t column) const {
    if constexpr (C::kFloatOut)
      return __ldcg(reinterpret_cast<float4 const*>(from + offset(row, column)));
    else
      return unpacked(__ldcg(reinterpret_cast<uint2 const*>(from + offset(row, column))));
  }
  static __device__ __forceinline__ float4 rounded(float4 v) {
    if constexpr (C::kFloatOut)
      return v;
    else
      return unpacked(make_uint2(ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w)));
  }

  // One piece of one slice of the own chunk, 16 bytes a thread at a time; k is a multiple of 8.
  __device__ __forceinline__ void copy(uint32_t slice, uint32_t piece, uint32_t pieces) const {
    FewRowsParams const& p = cta_.params;
    uint32_t begin = slice * p.slice_blocks * kBlockK;
    if (begin >= p.shape.k) return;
    uint32_t across = schedule::smaller(p.slice_blocks * kBlockK, p.shape.k - begin) / 8, count = across * p.shape.chunk_rows;
    uint32_t each = schedule::ceil_div(count, pieces), last = schedule::smaller(count, (piece + 1) * each);
    for (uint32_t v = piece * each + thread_; v < last; v += C::kConsumerThreads) {
      uint32_t row = v / across, column = begin + (v - row * across) * 8;
      uint4 bits = __ldg(reinterpret_cast<uint4 const*>(p.x_data + (uint64_t(row) * p.shape.k + column) * 2));
      uint64_t to = (uint64_t(p.rank * p.shape.chunk_rows + row) * p.shape.k + column) * 2;
      for (uint32_t i = 1; i <= p.shape.ranks; ++i) {
        uint32_t destination = (p.rank + i) % p.shape.ranks;  // the own staging last
        *reinterpret_cast<uint4*>(cta_.staging(destination) + to) = bits;
      }
    }
  }

  FewRowsCta<C> const& cta_;
  uint32_t thread_, portion_;  // a portion has 1 << portion_ rows
  uint32_t stage_ = 0, phase_ = 0;
  float acc_[C::kRows / 2];
};

// ----------------------------------------------------------------------------------------------------------------- body

template <class C>
__device__ __forceinline__ void few_rows_matmul(FewRowsParams const& params) {
  extern __shared__ uint8_t memory[];
  FewRowsCta<C> cta{params, (ptx::shared_address(memory) + 1023) & ~1023u, ptx::cta_in_cluster(), 0};
  uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), tiles = params.shape.tiles;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&params.x[0]);
    ptx::prefetch_map(&params.w);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      ptx::mbarrier_init(cta.full(s), 1);
      ptx::mbarrier_init(cta.empty(s), kConsumers * 4);
    }
    ptx::mbarrier_init_fence();
  }
  // One thread of the leader CTA claims for the cluster.
  auto claim_tile = [&] {
    if (threadIdx.x != 0 || cta.slice != 0) return;
    Claim mine = claim(params, cta.control());
    for (uint32_t i = 0; i < params.shape.slices; ++i) {
      ptx::store_shared_at_cta(cta.claimed_tile(), i, mine.position);
      ptx::store_shared_at_cta(cta.claimed_tile() + 4, i, mine.epoch);
    }
  };
  __syncwarp();
  ptx::cluster_sync();  // all CTAs run
  claim_tile();
  __syncwarp();
  ptx::cluster_sync();
  cta.epoch = ptx::load_shared(cta.claimed_tile() + 4);
  uint32_t tile = ptx::load_shared(cta.claimed_tile());

  if (warp < 4) {
    ptx::registers_shrink<kRoleRegisters>();
    FewRowsLoader<C> loader(cta);
    while (tile < tiles) {
      if (threadIdx.x == 0) loader.load(tile);
      __syncwarp();
      ptx::cluster_sync();  // all products are done: sums may take the stages' place
      ptx::cluster_sync();  // all sums have been handed over
      claim_tile();
      __syncwarp();
      ptx::cluster_sync();  // this tile is finished, the next one known
      tile = ptx::load_shared(cta.claimed_tile());
    }
  } else {
    ptx::registers_grow<kConsumerRegisters>();
    FewRowsConsumer<C> consumer(cta, threadIdx.x - 128);
    if constexpr (C::kGather) consumer.gather();
    while (tile < tiles) {
      consumer.multiply();
      __syncwarp();
      ptx::cluster_sync();
      consumer.trade();
      __syncwarp();
      ptx::cluster_sync();
      consumer.finish(tile);
      ptx::fence_proxy_async_shared();  // the loader's next stages go where the sums were
      __syncwarp();
      ptx::cluster_sync();
      tile = ptx::load_shared(cta.claimed_tile());
    }
  }
}

}  // namespace entwine::sm90
