// Consumers for few rows: two warpgroups, each with 64 of the tile's columns and all rows. They copy the own chunk of x to the
// ranks that need it (all-gather), multiply, trade slices' sums within the cluster, and exchange sums with the peers.
#pragma once

#include "kernel/ptx/cluster.cuh"
#include "kernel/ptx/matrix.cuh"
#include "kernel/ptx/memory_order.cuh"
#include "kernel/ptx/wgmma.cuh"
#include "kernel/sm90/epilogue.cuh"
#include "kernel/sm90/few_rows_config.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

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
    if constexpr (C::kFloat8) {
      if (cta_.params.e5m2) return multiply_as<Operands::kE5m2>();
    }
    multiply_as<C::kOperands>();
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

  // Rows of this CTA's portion: exchanges with peers, adds the bias, activates, rounds, stores y.
  __device__ __forceinline__ void finish(uint32_t tile) {
    FewRowsParams const& p = cta_.params;
    float4 bias = bias_of(tile);
    if constexpr (C::kGather) {
      each_row(tile, [&](uint32_t row, uint32_t column, float4 v) { store(p.y, y_row(row), column, finished(v, bias)); });
    } else {
      each_row(tile, [&](uint32_t row, uint32_t column, float4 v) {
        if constexpr (C::kScatter) {
          uint32_t owner = row / p.shape.m_shard % p.shape.ranks;
          if (owner != p.rank) send(owner, slot(owner, p.rank) + y_row(row), column, v);
        } else {
          for (uint32_t peer = 0; peer < p.shape.ranks; ++peer)
            if (peer != p.rank) send(peer, slot(peer, p.rank) + row, column, v);
        }
      });
      if (!as_packets()) {
        sync();
        uint32_t word = tile * p.shape.slices + cta_.slice;
        if (thread_ < p.shape.ranks && thread_ != p.rank) {
          ptx::store_release_system(cta_.signal(thread_, p.rank, word), schedule::signal_value(cta_.epoch));
          wait_for_peer(cta_, cta_.signal(p.rank, thread_, word), thread_, cta_.slice, tile);
        }
        sync();
      }
      each_row(tile, [&](uint32_t row, uint32_t column, float4 own) {
        if constexpr (C::kScatter) {
          if (row / p.shape.m_shard % p.shape.ranks != p.rank) return;
        } else {
          own = rounded(own);  // what the peers add, so that all get the same bits
        }
        float4 total = make_float4(0, 0, 0, 0);
        for (uint32_t source = 0; source < p.shape.ranks; ++source) {
          float4 v = own;
          if (source != p.rank) v = receive(source, slot(p.rank, source) + (C::kScatter ? y_row(row) : row), column, tile);
          total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
        }
        store(p.y, C::kScatter ? y_row(row) : row, column, finished(total, bias));
      });
    }
  }

 private:
  static constexpr uint32_t kAcross = C::kTileN / 4;  // threads that share a row

  static __device__ __forceinline__ void sync() { ptx::barrier_sync(1, C::kConsumerThreads); }
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (float& value : acc_) asm volatile("" : "+f"(value)::"memory");
  }

  template <Operands kOperands>
  __device__ __forceinline__ void multiply_as() {
    // A slice may be empty. (And what is set here need not live through the rest of a tile.)
#pragma unroll
    for (float& value : acc_) value = 0;
    uint32_t blocks = cta_.blocks();
    for (uint32_t block = 0; block < blocks; ++block) {
      ptx::mbarrier_wait(cta_.full(stage_), phase_);
      uint64_t w =
          ptx::wgmma_descriptor(cta_.w(stage_) + thread_ / 128 * 64 * kBlockBytes, C::kTransposedW ? 16 : kImageBytes, 1024);
      uint64_t x = ptx::wgmma_descriptor(cta_.x(stage_), 16, 1024);
      pin();
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < static_cast<int>(kBlockBytes) / 32; ++i)
        ptx::wgmma_step<kOperands, 0, C::kTransposedW ? 0 : 1, true>(acc_, w + i * ((C::kTransposedW ? 32 : 2048) >> 4),
                                                                     x + i * (32 >> 4), true);
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

  __device__ __forceinline__ uint32_t portion_rows() const { return 1u << portion_; }
  // Where slice `slice` leaves its sums of one row of this CTA's portion.
  __device__ __forceinline__ uint32_t sum(uint32_t slice, uint32_t local, uint32_t column) const {
    return cta_.base + (slice * portion_rows() + local) * C::kSumPitch + column * 4;
  }

  // Of this thread's four columns.
  __device__ __forceinline__ float4 bias_of(uint32_t tile) const {
    uint32_t column = tile * C::kTileN + thread_ % kAcross * 4;
    float const* bias = cta_.params.epilogue.bias;
    if (bias == nullptr || column >= cta_.params.shape.n) return make_float4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<float4 const*>(bias + column));
  }
  __device__ __forceinline__ float4 finished(float4 v, float4 bias) const {
    float values[4] = {v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w};
    activate<4>(cta_.params.epilogue, values);
    return make_float4(values[0], values[1], values[2], values[3]);
  }

  // A share of the threads for each row, four columns a thread: use(row, column of n, the slices' sum), scaled if it is one of
  // float8.
  template <class Use>
  __device__ __forceinline__ void each_row(uint32_t tile, Use use) const {
    FewRowsParams const& p = cta_.params;
    uint32_t in_tile = thread_ % kAcross * 4, column = tile * C::kTileN + in_tile;
    if (column >= p.shape.n) return;  // n is a multiple of 4
    float scale = 1;
    if constexpr (C::kFloat8) scale = __ldg(p.scale);
    for (uint32_t local = thread_ / kAcross; local < portion_rows(); local += C::kConsumerThreads / kAcross) {
      uint32_t row = cta_.slice * portion_rows() + local;
      if (row >= p.shape.rows) return;
      float4 total = ptx::load_shared_f32x4(sum(0, local, in_tile));
      for (uint32_t slice = 1; slice < p.shape.slices; ++slice) {
        float4 v = ptx::load_shared_f32x4(sum(slice, local, in_tile));
        total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
      }
      if constexpr (C::kFloat8) total = make_float4(total.x * scale, total.y * scale, total.z * scale, total.w * scale);
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
    return (uint64_t(row) * cta_.params.shape.n + column) * (C::kFloatOut ? 4 : 2);
  }
  __device__ __forceinline__ void store(uint8_t* to, uint32_t row, uint32_t column, float4 v) const {
    if constexpr (C::kFloatOut)
      *reinterpret_cast<float4*>(to + offset(row, column)) = v;
    else
      *reinterpret_cast<uint2*>(to + offset(row, column)) = packed(v);
  }
  static __device__ __forceinline__ uint2 packed(float4 v) {
    return make_uint2(C::Pair::pack(v.x, v.y), C::Pair::pack(v.z, v.w));
  }
  static __device__ __forceinline__ float4 unpacked(uint2 bits) {
    float2 low = C::Pair::unpack(bits.x), high = C::Pair::unpack(bits.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
  // What a peer has written; not from L1.
  __device__ __forceinline__ float4 load(uint8_t const* from, uint32_t row, uint32_t column) const {
    if constexpr (C::kFloatOut)
      return __ldcg(reinterpret_cast<float4 const*>(from + offset(row, column)));
    else
      return unpacked(__ldcg(reinterpret_cast<uint2 const*>(from + offset(row, column))));
  }

  __device__ __forceinline__ bool as_packets() const { return C::kRows < schedule::kFewRowsMost && cta_.params.shape.packets; }
  // Sums of four columns to a peer's arena, and those that a peer has sent.
  __device__ __forceinline__ void send(uint32_t peer, uint32_t row, uint32_t column, float4 v) const {
    if (!as_packets()) return store(cta_.staging(peer), row, column, v);
    uint64_t* to = cta_.packets(peer) + offset(row, column) / 4;
    uint32_t flag = schedule::signal_value(cta_.epoch);
    if constexpr (C::kFloatOut) {
      ptx::store_packets(to, __float_as_uint(v.x), __float_as_uint(v.y), flag);
      ptx::store_packets(to + 2, __float_as_uint(v.z), __float_as_uint(v.w), flag);
    } else {
      uint2 bits = packed(v);
      ptx::store_packets(to, bits.x, bits.y, flag);
    }
  }
  __device__ __forceinline__ float4 receive(uint32_t peer, uint32_t row, uint32_t column, uint32_t tile) const {
    if (!as_packets()) return load(cta_.staging(cta_.params.rank), row, column);
    uint64_t const* from = cta_.packets(cta_.params.rank) + offset(row, column) / 4;
    uint2 low = awaited(from, peer, tile);
    if constexpr (!C::kFloatOut) return unpacked(low);
    uint2 high = awaited(from + 2, peer, tile);
    return make_float4(__uint_as_float(low.x), __uint_as_float(low.y), __uint_as_float(high.x), __uint_as_float(high.y));
  }
  // The data of two packets, when they are this call's.
  __device__ __forceinline__ uint2 awaited(uint64_t const* from, uint32_t peer, uint32_t tile) const {
    uint32_t wanted = schedule::signal_value(cta_.epoch);
    uint64_t start = 0;
    for (uint32_t looks = 1;; ++looks) {
      ptx::Packets p = ptx::load_packets(from);
      if (p.first_flag == wanted && p.second_flag == wanted) return make_uint2(p.first, p.second);
      if (looks % 256 != 0 || cta_.params.timeout_ns == 0) continue;
      uint64_t now = ptx::nanoseconds();
      if (start == 0) start = now;
      if (now - start > cta_.params.timeout_ns) give_up(cta_, peer, cta_.slice, tile, p.first_flag, wanted);
    }
  }
  static __device__ __forceinline__ float4 rounded(float4 v) {
    if constexpr (C::kFloatOut)
      return v;
    else
      return unpacked(packed(v));
  }

  // One piece of one slice of the own chunk, 16 bytes a thread at a time, of which a row is a multiple.
  __device__ __forceinline__ void copy(uint32_t slice, uint32_t piece, uint32_t pieces) const {
    FewRowsParams const& p = cta_.params;
    constexpr uint32_t kAtOnce = 16 / C::kElementBytes;
    uint32_t begin = slice * p.slice_blocks * C::kBlockK;
    if (begin >= p.shape.k) return;
    uint32_t across = schedule::smaller(p.slice_blocks * C::kBlockK, p.shape.k - begin) / kAtOnce;
    uint32_t count = across * p.shape.chunk_rows;
    uint32_t each = schedule::ceil_div(count, pieces), last = schedule::smaller(count, (piece + 1) * each);
    for (uint32_t v = piece * each + thread_; v < last; v += C::kConsumerThreads) {
      uint32_t row = v / across, column = begin + (v - row * across) * kAtOnce;
      uint4 bits = __ldg(reinterpret_cast<uint4 const*>(p.x_data + (uint64_t(row) * p.shape.k + column) * C::kElementBytes));
      uint64_t to = (uint64_t(p.rank * p.shape.chunk_rows + row) * p.shape.k + column) * C::kElementBytes;
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

}  // namespace entwine::sm90
