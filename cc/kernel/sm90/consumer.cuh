// Consumer: a warpgroup with 64 rows of the tile, up to 128 float32 accumulators a thread. It multiplies, adds partial sums
// that its storer has fetched, bias and activation, rounds once and hands 8 KB images to its storer. It waits for its loader,
// its storer and the next tile's post; of peers only through these.
#pragma once

#include "kernel/ptx/matrix.cuh"
#include "kernel/ptx/wgmma.cuh"
#include "kernel/sm90/epilogue.cuh"
#include "kernel/sm90/scheduler.cuh"

namespace entwine::sm90 {

// Keeps the compiler from moving accumulators across asynchronous products.
template <int kCount>
__device__ __forceinline__ void pin(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// One image of the accumulators: 64 rows of 128 bytes, 16-byte chunks swizzled by row. kImageCols / 2 accumulators a thread.
template <class C>
struct Image {
  static constexpr int kValues = C::kImageCols / 2;

  // All but the first kRepeated, which an earlier image has had.
  template <int kRepeated>
  static __device__ __forceinline__ void add(uint32_t image, float* acc, uint32_t warp, uint32_t lane) {
    if constexpr (C::kFloatOut) {
#pragma unroll
      for (int j = kRepeated / 4; j < kValues / 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float a, b;
          ptx::load_shared_f32x2(address(image, j, h, warp, lane), a, b);
          acc[j * 4 + h * 2] += a;
          acc[j * 4 + h * 2 + 1] += b;
        }
    } else {
#pragma unroll
      for (int j = kRepeated / 8; j < kValues / 8; ++j) {
        uint32_t r[4];
        ptx::ldmatrix_x4(address(image, j, 0, warp, lane), r);
#pragma unroll
        for (int i = 0; i < 4; ++i) C::Pair::add(acc[j * 8 + i * 2], acc[j * 8 + i * 2 + 1], r[i]);
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
        ptx::stmatrix_x4(address(image, j, 0, warp, lane), C::Pair::pack(d[0], d[1]), C::Pair::pack(d[2], d[3]),
                         C::Pair::pack(d[4], d[5]), C::Pair::pack(d[6], d[7]));
      }
    }
  }

 private:
  // 16 bits: the 16-byte row of matrix pair j that this lane names to ldmatrix/stmatrix. float32: this lane's two values of
  // column group j, in the upper (h 0) or lower (h 1) eight rows.
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
class Consumer {
 public:
  __device__ __forceinline__ Consumer(Cta<C> const& cta, uint32_t index, uint32_t warp, uint32_t lane)
      : cta_(cta), tiles_(cta.shared), index_(index), warp_(warp), lane_(lane) {}

  __device__ __forceinline__ void run() {
    for (uint32_t packed; (packed = take()) != kNoTile;) {
      schedule::Tile tile = unpack_tile(packed);
      bool own = C::kGather || tile.owner == cta_.params.rank;
      if constexpr (C::kGather) product_ = cta_.params.begin.of(tile.col);
      if (own) load_bias(tile.col);
      // How x lies is in the instruction, so there are two loops.
      if (C::kTurnsX && cta_.params.transposed_x)
        multiply<C::kTurnsX>();
      else
        multiply<false>();
      ptx::wgmma_wait<0>();
      pin(acc_);
      release(before(stage_));
      if constexpr (C::kFloat8) scale();
      store(own);
    }
  }

 private:
  // From one 32 bytes of k to the next, in units of descriptors: of an operand that is contiguous in k, or isn't.
  static constexpr int kAlong = 32 >> 4, kAcross = 2048 >> 4;
  static constexpr int kStepB = C::kTransposedW ? kAlong : kAcross, kTransposeB = C::kTransposedW ? 0 : 1;

  __device__ __forceinline__ uint32_t take() {
    uint32_t packed = tiles_.next();
    __syncwarp();
    if (lane_ == 0 && packed != kNoTile) tiles_.taken();
    return packed;
  }

  // x as (row, k): rows of 128 bytes; as (k, row): an image of 64 rows, contiguous, which begins where these would.
  __device__ __forceinline__ uint64_t x_of(uint32_t stage) const {
    return ptx::wgmma_descriptor(cta_.shared.a(stage) + (C::kStacked ? index_ * 64 * kBlockBytes : 0), 16, 1024);
  }
  // w as (k, n): panels of 64 columns, 8 KB apart; as (n, k): rows of 128 bytes.
  __device__ __forceinline__ uint64_t w_of(uint32_t stage) const {
    return ptx::wgmma_descriptor(cta_.shared.b(stage) + (C::kStacked ? 0 : index_ * C::kConsumerN * kBlockBytes),
                                 C::kTransposedW ? 16 : kImageBytes, 1024);
  }

  // All k blocks; the last one's products may still be under way.
  template <bool kTurned>
  __device__ __forceinline__ void multiply() {
    for (uint32_t k = 0; k < cta_.params.k_blocks; ++k) {
      multiply<kTurned>(k);
      ptx::wgmma_wait<1>();  // the previous k block's products are done: its stage is free
      pin(acc_);
      if (k > 0) release(before(stage_));
      advance();
    }
  }

  // One k block, all columns; `kTurned`: x is stored transposed.
  template <bool kTurned>
  __device__ __forceinline__ void multiply(uint32_t k) {
    constexpr int kStepA = kTurned ? kAcross : kAlong;
    ptx::mbarrier_wait(cta_.shared.full(stage_), phase_);
    uint64_t a = x_of(stage_), b = w_of(stage_);
    pin(acc_);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < static_cast<int>(kBlockBytes) / 32; ++i)
      ptx::wgmma_step<C::kOperands, kTransposeB, kTurned>(acc_, a + i * kStepA, b + i * kStepB, k > 0 || i > 0);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void scale() {
    float factor = __ldg(cta_.params.scale + (C::kGather ? product_ : 0));
#pragma unroll
    for (float& value : acc_) value *= factor;
  }

  __device__ __forceinline__ Epilogue const& epilogue() const { return cta_.params.epilogue[C::kGather ? product_ : 0]; }
  __device__ __forceinline__ bool gated() const { return C::kGates && cta_.params.gated; }

  __device__ __forceinline__ void load_bias(uint32_t tile_col) {
    Params const& p = cta_.params;
    if (gated()) {
      bias_.load(p.epilogue[0], p.epilogue[1], tile_col * (C::kTileN / 2), p.n[0], lane_);
    } else {
      uint32_t first = C::kGather ? p.begin.at[product_] : 0;
      bias_.load(epilogue(), (tile_col - first) * C::kTileN + (C::kStacked ? 0 : index_ * C::kConsumerN),
                 p.n[C::kGather ? product_ : 0], lane_);
    }
  }

  __device__ __forceinline__ bool biased() const {
    return epilogue().bias != nullptr || (gated() && cta_.params.epilogue[1].bias != nullptr);
  }

  // Bias and activation of one image, whose sums are whole: of those of its columns that no earlier image has.
  template <int kImage>
  __device__ __forceinline__ void finish() {
    constexpr int kFirst = kImage * Image<C>::kValues, kLeft = C::kAccumulators - kFirst;
    constexpr int kValues = kLeft < Image<C>::kValues ? kLeft : Image<C>::kValues, kUp = kFirst + C::kAccumulators / 2;
    float* values = acc_ + kFirst;
    if (biased()) bias_.template add<kFirst / 4, kValues / 4>(values, lane_);
    activate<kValues>(epilogue(), values);
    if constexpr (C::kGates && kUp < C::kAccumulators)
      if (gated()) {  // by the same elements of up
        float* ups = acc_ + kUp;
        if (biased()) bias_.template add<kUp / 4, kValues / 4>(ups, lane_);
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] *= ups[i];
      }
  }

  // Adds what has to be added and hands the tile to the storer, image by image; an own tile becomes y. (A loop over images is
  // more than the compiler unrolls, and then accumulators aren't registers.)
  template <int kImage = 0>
  __device__ __forceinline__ void store(bool own) {
    Shared<C> const& shared = cta_.shared;
    constexpr int kBegin = C::image_begin(kImage) / 2, kRepeated = kImage * Image<C>::kValues - kBegin;
    float* values = acc_ + kBegin;
    uint32_t buffer = used_ % C::kBuffers;
    if constexpr (C::kGather) finish<kImage>();  // before the wait, which that may make shorter
    ptx::mbarrier_wait(shared.buffer_ready(index_, buffer), (used_ / C::kBuffers) & 1);
    if (!C::kGather && own) {
      for (uint32_t partial = 1;; ++partial) {  // in rank order; the last one's buffer takes the result
        Image<C>::template add<kRepeated>(shared.image(index_, buffer), values, warp_, lane_);
        if (partial == cta_.params.ranks - 1) break;
        ptx::mbarrier_arrive(shared.buffer_done(index_, buffer));
        buffer = ++used_ % C::kBuffers;
        ptx::mbarrier_wait(shared.buffer_ready(index_, buffer), (used_ / C::kBuffers) & 1);
      }
      finish<kImage>();
    }
    Image<C>::store(shared.image(index_, buffer), values, warp_, lane_);
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(shared.buffer_done(index_, buffer));
    ++used_;
    if constexpr (kImage + 1 == C::kImages / 2)
      if (gated()) return;  // what is left has been multiplied in
    if constexpr (kImage + 1 < C::kImages) store<kImage + 1>(own);
  }

  // Both CTAs' loaders fill this stage's w: tell both.
  __device__ __forceinline__ void release(uint32_t stage) const {
    if (lane_ < kCtas) ptx::mbarrier_arrive_at_cta(cta_.shared.empty(stage), lane_);
  }
  static __device__ __forceinline__ uint32_t before(uint32_t stage) { return stage == 0 ? C::kStages - 1 : stage - 1; }
  __device__ __forceinline__ void advance() {
    if (++stage_ == C::kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  Cta<C> const& cta_;
  TileStream<C> tiles_;
  uint32_t index_, warp_, lane_;
  uint32_t stage_ = 0, phase_ = 0;
  uint32_t used_ = 0;     // C buffers used so far
  uint32_t product_ = 0;  // all-gather: which one the tile is of
  ColumnBias<C> bias_;
  float acc_[C::kAccumulators];
};

}  // namespace entwine::sm90
