// Strategy "signal" on Hopper, 16-bit operands and results: the matmul, and the last copy, which takes tiles out of their
// groups, and images out of their swizzle, to their rows and columns in y; bias and activation on the way.
#include "kernel/signal.h"
#include "kernel/sm90/signal_body.cuh"
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

template <uint32_t kTileN, bool kTransposedW, Operands kOperands>
SignalKernel kernel_of(int* shared_bytes) {
  using C = SignalConfig<kTileN, kOperands, kTransposedW>;
  *shared_bytes = Shared<C>::kAllocated;
  if constexpr (kOperands == Operands::kF16)
    return sm90_signal_matmul_f16<C>;
  else
    return sm90_signal_matmul_bf16<C>;
}

template <uint32_t kTileN, bool kTransposedW>
SignalKernel kernel_of(Operands operands, int* shared_bytes) {
  return operands == Operands::kF16 ? kernel_of<kTileN, kTransposedW, Operands::kF16>(shared_bytes)
                                    : kernel_of<kTileN, kTransposedW, Operands::kBf16>(shared_bytes);
}

template <uint32_t kTileN>
SignalKernel kernel_of(SignalVariant const& v, int* shared_bytes) {
  return v.transposed_w ? kernel_of<kTileN, true>(v.operands, shared_bytes)
                        : kernel_of<kTileN, false>(v.operands, shared_bytes);
}

// A block copies one part of a tile at a time: images of 64 rows x 128 bytes, 16 bytes a thread, neighbours in a row of y.
template <class Pair>
__global__ void __launch_bounds__(kFinishThreads) sm90_signal_finish(__grid_constant__ const FinishParams p) {
  constexpr uint32_t kVectors = kImageBytes / 16;
  static_assert(kVectors % kFinishThreads == 0, "every thread has as many of an image");
  schedule::TileParts parts{{p.tile_m, p.tile_n}};
  uint32_t images = parts.cols() / 64, units = (p.end - p.first) * schedule::kSm90Parts;
  bool plain = p.epilogue.bias == nullptr && p.epilogue.curve == Curve::kNone;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    uint32_t cell = p.first + unit / schedule::kSm90Parts, part = unit % schedule::kSm90Parts;
    schedule::Raster::Cell at = p.raster.at(cell);
    uint32_t batch = at.row / p.row_blocks, first_row = (at.row - batch * p.row_blocks) * p.tile_m + parts.row(part);
    uint64_t slot = p.groups.slot(p.owners, p.owner, cell);
    uint8_t const* from = p.scratch + (slot * schedule::kSm90Parts + part) * images * kImageBytes;
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
        uint32_t v = threadIdx.x + i * kFinishThreads, row = first_row + v / 8;
        uint32_t col = at.col * p.tile_n + parts.col(part) + image * 64 + v % 8 * 8;
        if (row >= p.m_shard || col >= p.n) continue;
        if (!plain) {
          float2 a = Pair::unpack(values[i].x), b = Pair::unpack(values[i].y), c = Pair::unpack(values[i].z),
                 d = Pair::unpack(values[i].w);
          float sums[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
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

}  // namespace

SignalKernel signal_kernel(SignalVariant const& v, int* shared_bytes) {
  return v.tile_n == 128 ? kernel_of<128>(v, shared_bytes) : kernel_of<256>(v, shared_bytes);
}

FinishKernel finish_kernel(Operands operands) {
  return operands == Operands::kF16 ? sm90_signal_finish<ptx::F16Pair> : sm90_signal_finish<ptx::Bf16Pair>;
}

}  // namespace entwine::sm90
