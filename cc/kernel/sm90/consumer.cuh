// Consumer: a warpgroup with 64 rows of the tile, 128 float32 accumulators a thread. It multiplies, adds partial sums that its
// storer has fetched, rounds once and hands 8 KB images to its storer. It never waits for a peer, only for its storer.
#pragma once

#include "kernel/ptx/matrix.cuh"
#include "kernel/ptx/wgmma.cuh"
#include "kernel/sm90/scheduler.cuh"

namespace entwine::sm90 {

// Keeps the compiler from moving accumulators across asynchronous products.
__device__ __forceinline__ void pin(float (&acc)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// One image of the accumulators: 64 rows of 128 bytes, 16-byte chunks swizzled by row. kImageCols / 2 accumulators a thread.
template <class C>
struct Image {
  static constexpr int kValues = C::kImageCols / 2;

  static __device__ __forceinline__ void add(uint32_t image, float* acc, uint32_t warp, uint32_t lane) {
    if constexpr (C::kFloatOut) {
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float a, b;
          ptx::load_shared_f32x2(address(image, j, h, warp, lane), a, b);
          acc[j * 4 + h * 2] += a;
          acc[j * 4 + h * 2 + 1] += b;
        }
    } else {
#pragma unroll
      for (int j = 0; j < kValues / 8; ++j) {
        uint32_t r[4];
        ptx::ldmatrix_x4(address(image, j, 0, warp, lane), r);
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::add_bf16_pair(acc[j * 8 + i * 2], acc[j * 8 + i * 2 + 1], r[i]);
      }
    }
  }

  static __device__ __forceinline__ void store(uint32_t image, float const* acc, uint32_t warp, uint32_t lane) {
    if constexpr (C::kFloatOut) {
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          ptx::store_shared_f32x2(address(image, j, h, warp, lane), acc[j * 4 + h * 2], acc[j * 4 + h * 2 + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < kValues / 8; ++j) {
        float const* d = acc + j * 8;
        ptx::stmatrix_x4(address(image, j, 0, warp, lane), ptx::pack_bf16(d[0], d[1]), ptx::pack_bf16(d[2], d[3]),
                         ptx::pack_bf16(d[4], d[5]), ptx::pack_bf16(d[6], d[7]));
      }
    }
  }

 private:
  // bf16: the 16-byte row of matrix pair j that this lane names to ldmatrix/stmatrix. float32: this lane's two values of column
  // group j, in the upper (h 0) or lower (h 1) eight rows.
  static __device__ __forceinline__ uint32_t address(uint32_t image, int j, int h, uint32_t warp, uint32_t lane) {
    uint32_t row, chunk, rest;
    if constexpr (C::kFloatOut) {
      row = warp * 16 + h * 8 + lane / 4;
      chunk = j * 2 + (lane & 3) / 2;
      rest = (lane & 1) * 8;
    } else {
      row = warp * 16 + (lane & 15);
      chunk = j * 2 + (lane >> 4);
      rest = 0;
    }
    return image + row * 128 + ((chunk ^ (row & 7)) << 4) + rest;
  }
};

template <class C>
__device__ __forceinline__ void consume(Cta<C> const& cta, uint32_t consumer, uint32_t warp, uint32_t lane) {
  Params const& p = cta.params;
  Shared<C> const& shared = cta.shared;
  TileStream<C> tiles(shared);
  uint32_t stage = 0, phase = 0, used = 0;  // C buffers used so far
  float acc[128];
  // Both CTAs' loaders fill this stage's w: tell both.
  auto release = [&](uint32_t s) {
    if (lane < kCtas) ptx::mbarrier_arrive_at_cta(shared.empty(s), lane);
  };
  auto before = [](uint32_t s) { return s == 0 ? C::kStages - 1 : s - 1; };

  for (uint32_t packed; (packed = tiles.next()) != kNoTile;) {
    __syncwarp();
    if (lane == 0) tiles.taken();
    for (uint32_t k = 0; k < p.k_blocks; ++k) {
      ptx::mbarrier_wait(shared.full(stage), phase);
      uint64_t a = ptx::wgmma_descriptor(shared.a(stage) + consumer * 64 * kBlockK * 2, 16, 1024);
      // w as (k, n): panels of 64 columns, 8 KB apart; a step of 16 in k is 2 KB. As (n, k): a step is 32 bytes.
      uint64_t b = C::kTransposedW ? ptx::wgmma_descriptor(shared.b(stage), 16, 1024)
                                   : ptx::wgmma_descriptor(shared.b(stage), kImageBytes, 1024);
      constexpr int kStepA = 32 >> 4, kStepB = (C::kTransposedW ? 32 : 2048) >> 4;
      pin(acc);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlockK / 16; ++i)
        ptx::wgmma_m64n256k16<C::kTransposedW ? 0 : 1>(acc, a + i * kStepA, b + i * kStepB, k > 0 || i > 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // the previous k block's products are done: its stage is free
      pin(acc);
      if (k > 0) release(before(stage));
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    ptx::wgmma_wait<0>();
    pin(acc);
    release(before(stage));

    bool reduce = !C::kGather && unpack_tile(packed).owner == p.rank;
#pragma unroll
    for (int i = 0; i < C::kImages; ++i) {
      float* values = acc + i * Image<C>::kValues;
      uint32_t buffer = used % C::kBuffers;
      ptx::mbarrier_wait(shared.buffer_ready(consumer, buffer), (used / C::kBuffers) & 1);
      if (reduce)
        for (uint32_t partial = 1;; ++partial) {  // in rank order; the last one's buffer takes the result
          Image<C>::add(shared.image(consumer, buffer), values, warp, lane);
          if (partial == p.ranks - 1) break;
          ptx::mbarrier_arrive(shared.buffer_done(consumer, buffer));
          buffer = ++used % C::kBuffers;
          ptx::mbarrier_wait(shared.buffer_ready(consumer, buffer), (used / C::kBuffers) & 1);
        }
      Image<C>::store(shared.image(consumer, buffer), values, warp, lane);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(shared.buffer_done(consumer, buffer));
      ++used;
    }
  }
}

}  // namespace entwine::sm90
