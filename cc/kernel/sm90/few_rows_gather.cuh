// All-gather of few rows: the consumers send the own chunk of x to the ranks that need it, in units of (slice of k, piece).
//
// To staging, the own one too, from where TMA loads all rows: a unit's bytes, then its signal at each rank. Or as packets: then
// each CTA picks its slice of all peers' rows out of them, and of the own rows out of x, and keeps them in shared memory, laid
// out as TMA would (16-byte pieces of a row's 128 bytes, swizzled).
#pragma once

#include "kernel/ptx/cluster.cuh"
#include "kernel/ptx/matrix.cuh"
#include "kernel/sm90/few_rows_packets.cuh"

namespace entwine::sm90 {

template <class C>
class FewRowsGather {
 public:
  __device__ __forceinline__ FewRowsGather(FewRowsCta<C> const& cta, uint32_t thread) : cta_(cta), thread_(thread) {}

  // Waits for nobody, until there is nothing left to claim.
  __device__ __forceinline__ void send() const {
    FewRowsParams const& p = cta_.params;
    uint32_t units = p.shape.slices * p.shape.pieces, *counter = &cta_.control()->push[cta_.parity()];
    uint32_t next = thread_ == 0 ? ptx::add_relaxed(counter, 1) : 0;
    for (;;) {
      if (thread_ == 0) ptx::store_shared(cta_.claimed_unit(), next);
      sync();
      uint32_t unit = ptx::load_shared(cta_.claimed_unit());
      if (unit >= units) return;
      if (thread_ == 0) next = ptx::add_relaxed(counter, 1);  // on its way while this one is copied
      uint32_t slice = unit % p.shape.slices, piece = unit / p.shape.slices, flag = schedule::signal_value(cta_.epoch);
      if (cta_.resident()) {
        each_share<8>(slice, piece, [&](uint64_t at) {
          uint2 bits = __ldg(reinterpret_cast<uint2 const*>(p.x_data + at));
          for (uint32_t peer = 0; peer < p.shape.ranks; ++peer)
            if (peer != p.rank) ptx::store_packets(cta_.packets(peer) + (chunk(peer) + at) / 4, bits.x, bits.y, flag);
        });
        sync();  // all know of this unit
      } else {
        each_share<16>(slice, piece, [&](uint64_t at) {
          uint4 bits = __ldg(reinterpret_cast<uint4 const*>(p.x_data + at));
          for (uint32_t i = 1; i <= p.shape.ranks; ++i) {
            uint32_t destination = (p.rank + i) % p.shape.ranks;  // the own staging last
            *reinterpret_cast<uint4*>(cta_.staging(destination) + p.rank * chunk_bytes() + at) = bits;
          }
        });
        ptx::fence_proxy_async_global();
        sync();
        if (thread_ < p.shape.ranks)
          ptx::store_release_system(cta_.signal(thread_, p.rank, slice * p.shape.pieces + piece), flag);
      }
    }
  }

  // A warp takes a row, or a part of one where rows are fewer.
  __device__ __forceinline__ void collect() const {
    FewRowsParams const& p = cta_.params;
    uint32_t rows = p.shape.rows, row_bytes = p.shape.k * C::kElementBytes, begin = cta_.first_block() * kBlockBytes;
    uint32_t bytes = cta_.blocks() * kBlockBytes, inside = bytes == 0 ? 0 : schedule::smaller(bytes, row_bytes - begin);
    uint32_t parts = schedule::larger(kWarps / rows, 1);
    for (uint32_t job = thread_ / 32; job < rows * parts; job += kWarps) {
      uint32_t row = job % rows, part = job / rows, source = row / p.shape.chunk_rows;
      uint64_t from = uint64_t(row - source * p.shape.chunk_rows) * row_bytes + begin;
      if (source == p.rank) {
        keep(row, part, parts, bytes, inside, [&](uint32_t at, uint32_t step, uint32_t which, uint32_t (&data)[kAtOnce][2]) {
#pragma unroll
          for (uint32_t i = 0; i < kAtOnce; ++i) {
            if ((which >> i & 1) == 0) continue;
            uint2 bits = __ldg(reinterpret_cast<uint2 const*>(p.x_data + from + at + i * step));
            data[i][0] = bits.x, data[i][1] = bits.y;
          }
        });
      } else {
        uint64_t const* words = cta_.packets(p.rank) + (schedule::peer_slot(p.rank, source) * chunk_bytes() + from) / 4;
        keep(row, part, parts, bytes, inside, [&](uint32_t at, uint32_t step, uint32_t which, uint32_t (&data)[kAtOnce][2]) {
          ptx::Packets packets[kAtOnce][1];
          await_packets(cta_, which, source, row, [&](uint32_t i) { return words + (at + i * step) / 4; }, packets);
#pragma unroll
          for (uint32_t i = 0; i < kAtOnce; ++i)
            if ((which >> i & 1) != 0) data[i][0] = packets[i][0].first, data[i][1] = packets[i][0].second;
        });
      }
    }
    ptx::fence_proxy_async_shared();
    sync();
  }

 private:
  static constexpr uint32_t kWarps = C::kConsumerThreads / 32, kAtOnce = 16;
  static __device__ __forceinline__ void sync() { ptx::barrier_sync(1, C::kConsumerThreads); }

  __device__ __forceinline__ uint64_t chunk_bytes() const {
    return uint64_t(cta_.params.shape.chunk_rows) * cta_.params.shape.k * C::kElementBytes;
  }
  // Where the own chunk begins with a peer.
  __device__ __forceinline__ uint64_t chunk(uint32_t peer) const {
    return schedule::peer_slot(peer, cta_.params.rank) * chunk_bytes();
  }

  // This thread's share of a piece of a slice of the own chunk: use(offset in bytes), kBytes each, of which a row is a
  // multiple.
  template <uint32_t kBytes, class Use>
  __device__ __forceinline__ void each_share(uint32_t slice, uint32_t piece, Use use) const {
    FewRowsParams const& p = cta_.params;
    uint32_t row_bytes = p.shape.k * C::kElementBytes, begin = slice * p.slice_blocks * kBlockBytes;
    if (begin >= row_bytes) return;
    uint32_t across = schedule::smaller(p.slice_blocks * kBlockBytes, row_bytes - begin) / kBytes;
    uint32_t count = across * p.shape.chunk_rows;
    uint32_t each = schedule::ceil_div(count, p.shape.pieces), last = schedule::smaller(count, (piece + 1) * each);
    for (uint32_t v = piece * each + thread_; v < last; v += C::kConsumerThreads) {
      uint32_t row = v / across;
      use(uint64_t(row) * row_bytes + begin + (v - row * across) * kBytes);
    }
  }

  // A warp's part of a row, 8 bytes a lane, zeros beyond its end: fetch(offset of the first, of the next ones, which, data).
  template <class Fetch>
  __device__ __forceinline__ void keep(uint32_t row, uint32_t part, uint32_t parts, uint32_t bytes, uint32_t inside,
                                       Fetch fetch) const {
    uint32_t step = parts * 256;
    for (uint32_t first = part * 256 + thread_ % 32 * 8; first < bytes; first += step * kAtOnce) {
      uint32_t data[kAtOnce][2] = {}, which = 0;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) which |= first + i * step < inside ? 1u << i : 0;
      fetch(first, step, which, data);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        uint32_t at = first + i * step, in_row = at % kBlockBytes;
        if (at >= bytes) break;
        ptx::store_shared_u32x2(cta_.x(at / kBlockBytes) + row * kBlockBytes + (in_row / 16 ^ row % 8) * 16 + in_row % 16,
                                data[i][0], data[i][1]);
      }
    }
  }

  FewRowsCta<C> const& cta_;
  uint32_t thread_;
};

}  // namespace entwine::sm90
