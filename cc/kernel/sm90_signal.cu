// Strategy "signal" on Hopper, 16-bit operands and results: the matmul, and the last copy, which takes tiles out of their
// groups, and images out of their swizzle, to their rows and columns in y; bias and activation on the way. Where copy engines
// have brought the peers' sums it adds them up, in rank order. And a wait for those.
#include "kernel/signal.h"
#include "kernel/sm90/signal_body.cuh"
#include "kernel/sm90/wait.cuh"
#include "schedule/tile_parts.h"

namespace entwine::sm90 {
namespace {

// By name, for profiles.
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_signal_matmul_bf16(__grid_constant__ const SignalParams params) {
  signal_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_signal_matmul_f16(__grid_constant__ const SignalParams params) {
  signal_matmul<C>(params);
}

template <uint32_t kTileN, bool kTransposedW, Operands kOperands, bool kTraced = false>
SignalKernel kernel_of(int* shared_bytes) {
  using C = SignalConfig<kTileN, kOperands, kTransposedW, kTraced>;
  *shared_bytes = Shared<C>::kAllocated;
  if constexpr (kOperands == Operands::kF16)
    return sm90_signal_matmul_f16<C>;
  else
    return sm90_signal_matmul_bf16<C>;
}

// Only large tiles of bf16 have kernels that take notes.
template <uint32_t kTileN, bool kTransposedW>
SignalKernel kernel_of(Operands operands, bool traced, int* shared_bytes) {
  if constexpr (kTileN == 256)
    if (traced && operands == Operands::kBf16) return kernel_of<kTileN, kTransposedW, Operands::kBf16, true>(shared_bytes);
  return operands == Operands::kF16 ? kernel_of<kTileN, kTransposedW, Operands::kF16>(shared_bytes)
                                    : kernel_of<kTileN, kTransposedW, Operands::kBf16>(shared_bytes);
}

template <uint32_t kTileN>
SignalKernel kernel_of(SignalVariant const& v, int* shared_bytes) {
  return v.transposed_w ? kernel_of<kTileN, true>(v.operands, v.traced, shared_bytes)
                        : kernel_of<kTileN, false>(v.operands, v.traced, shared_bytes);
}

template <class Pair>
__device__ __forceinline__ void unpack(uint4 const& v, float (&to)[8]) {
  float2 a = Pair::unpack(v.x), b = Pair::unpack(v.y), c = Pair::unpack(v.z), d = Pair::unpack(v.w);
  to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y, to[4] = c.x, to[5] = c.y, to[6] = d.x, to[7] = d.y;
}

// A block copies one part of a tile at a time: images of 64 rows x 128 bytes, 16 bytes a thread, neighbours in a row of y.
template <class Pair>
__global__ void __launch_bounds__(kFinishThreads) sm90_signal_finish(__grid_constant__ const FinishParams p) {
  constexpr uint32_t kVectors = kImageBytes / 16;
  static_assert(kVectors % kFinishThreads == 0, "every thread has as many of an image");
  schedule::TileParts parts{{p.tile_m, p.tile_n}};
  uint32_t images = parts.cols() / 64, units = (p.end - p.first) * schedule::kSm90Parts;
  bool plain = p.landed == nullptr && p.epilogue.bias == nullptr && p.epilogue.curve == Curve::kNone;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    uint32_t cell = p.first + unit / schedule::kSm90Parts, part = unit % schedule::kSm90Parts;
    schedule::Raster::Cell at = p.raster.at(cell);
    uint32_t batch = at.row / p.row_blocks, first_row = (at.row - batch * p.row_blocks) * p.tile_m + parts.row(part);
    uint64_t slot = p.groups.slot(p.owners, p.owner, cell);
    uint8_t const* from = p.scratch + (slot * schedule::kSm90Parts + part) * images * kImageBytes;
    uint8_t const* landed = p.landed + (uint64_t(cell) * schedule::kSm90Parts + part) * images * kImageBytes;
    uint16_t* to = static_cast<uint16_t*>(p.y) + uint64_t(batch) * p.m_shard * p.n;
    for (uint32_t image = 0; image < images; ++image) {
      uint4 values[kVectors / kFinishThreads];
#pragma unroll
      for (uint32_t i = 0; i < kVectors / kFinishThreads; ++i) {
        uint32_t v = threadIdx.x + i * kFinishThreads, row = v / 8, chunk = v % 8;
        values[i] = *reinterpret_cast<uint4 const*>(from + image * kImageBytes + row * 128 + ((chunk ^ (row & 7)) << 4));
      }
#pragma unroll
      for (uint32_t i = 0; i < kVectors / kFinishThreads; ++i) {
        uint32_t v = threadIdx.x + i * kFinishThreads, image_row = v / 8, row = first_row + image_row;
        uint32_t col = at.col * p.tile_n + parts.col(part) + image * 64 + v % 8 * 8;
        if (row >= p.m_shard || col >= p.n) continue;
        if (!plain) {
          float sums[8];
          unpack<Pair>(values[i], sums);
          if (p.landed != nullptr) {
            float own[8];
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) own[j] = sums[j], sums[j] = 0;
            uint32_t in_image = image * kImageBytes + image_row * 128 + ((v % 8 ^ (image_row & 7)) << 4);
            for (uint32_t rank = 0; rank < p.ranks; ++rank) {
              if (rank == p.rank) {
#pragma unroll
                for (uint32_t j = 0; j < 8; ++j) sums[j] += own[j];
                continue;
              }
              float theirs[8];
              uint64_t set = schedule::peer_slot(p.rank, rank) * p.landed_bytes;
              unpack<Pair>(*reinterpret_cast<uint4 const*>(landed + set + in_image), theirs);
#pragma unroll
              for (uint32_t j = 0; j < 8; ++j) sums[j] += theirs[j];
            }
          }
          if (p.epilogue.bias != nullptr) {
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) sums[j] += __ldg(p.epilogue.bias + col + j);
          }
          activate<8>(p.epilogue, sums);
          values[i] = make_uint4(Pair::pack(sums[0], sums[1]), Pair::pack(sums[2], sums[3]), Pair::pack(sums[4], sums[5]),
                                 Pair::pack(sums[6], sums[7]));
        }
        *reinterpret_cast<uint4*>(to + uint64_t(row) * p.n + col) = values[i];
      }
    }
  }
}

// A word is raised by a copy that the peer's stream has put behind the group's own, so its bytes are there.
__global__ void sm90_signal_await(__grid_constant__ const AwaitParams p) {
  __shared__ uint32_t stuck;
  if (threadIdx.x == 0) stuck = 0;
  __syncthreads();
  uint32_t peer = threadIdx.x / schedule::kMaxGroups, group = threadIdx.x % schedule::kMaxGroups;
  if (peer >= p.ranks || peer == p.rank || group < p.first || group >= p.end) return;
  uint32_t const* word = p.words + schedule::signal_word(peer, p.words_per_source, schedule::group_signal(group));
  uint32_t wanted = schedule::signal_value(p.epoch);
  uint64_t start = ptx::nanoseconds();
  for (uint32_t seen; !schedule::signal_reached(seen = ptx::load_acquire_system(word), wanted);) {
    __nanosleep(100);
    if (p.timeout_ns == 0 || ptx::nanoseconds() - start <= p.timeout_ns) continue;
    if (atomicAdd(&stuck, 1) == 0)
      write_report(p.stuck, {0, p.op, p.rank, peer, group, schedule::kGroupColumn, p.epoch, seen, wanted});
    end_kernel();
  }
}

// What the GPU's clock shows, for a trace.
__global__ void sm90_signal_clock(uint64_t* ns) { *ns = ptx::nanoseconds(); }

}  // namespace

SignalKernel signal_kernel(SignalVariant const& v, int* shared_bytes) {
  return v.tile_n == 128 ? kernel_of<128>(v, shared_bytes) : kernel_of<256>(v, shared_bytes);
}

FinishKernel finish_kernel(Operands operands) {
  return operands == Operands::kF16 ? sm90_signal_finish<ptx::F16Pair> : sm90_signal_finish<ptx::Bf16Pair>;
}

AwaitKernel await_kernel() { return sm90_signal_await; }

ClockKernel clock_kernel() { return sm90_signal_clock; }

}  // namespace entwine::sm90
