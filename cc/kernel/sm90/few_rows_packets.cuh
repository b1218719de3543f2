// What travels between ranks for few rows: packets, and a thread's sums of an octet of rows, as packets or as they are.
#pragma once

#include "kernel/ptx/memory_order.cuh"
#include "kernel/sm90/few_rows_config.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

// Looks for packets until all are this call's: look(i) at those of `wanted`, a bit each, that have not been seen, all on their
// way at once; seen(i) tells whether the last look was early enough.
template <class C, class Look, class Seen>
__device__ __forceinline__ void await_packets(FewRowsCta<C> const& cta, uint32_t wanted, uint32_t peer, uint32_t tile,
                                              Look look, Seen seen) {
  uint64_t start = 0;
  for (uint32_t looks = 1; wanted != 0; ++looks) {
    look(wanted);
    wanted = seen(wanted);
    if (looks % 256 != 0 || cta.params.timeout_ns == 0) continue;
    uint64_t now = ptx::nanoseconds();
    if (start == 0) start = now;
    if (now - start > cta.params.timeout_ns) give_up(cta, peer, cta.slice, tile, cta.epoch, schedule::signal_value(cta.epoch));
  }
}

// `at` counts values: four of them, of which those of 16 bits are two packets' data, those of 32 bits four's.
template <class C>
__device__ __forceinline__ void send_packets(uint64_t* packets, uint64_t at, float const (&v)[4], uint32_t flag) {
  if constexpr (C::kFloatOut) {
    ptx::store_packets(packets + at, __float_as_uint(v[0]), __float_as_uint(v[1]), flag);
    ptx::store_packets(packets + at + 2, __float_as_uint(v[2]), __float_as_uint(v[3]), flag);
  } else {
    ptx::store_packets(packets + at / 2, C::Pair::pack(v[0], v[1]), C::Pair::pack(v[2], v[3]), flag);
  }
}

// A peer's sums of a thread's octet, from staging, past L1, or as packets.
template <class C>
class Sums {
 public:
  __device__ __forceinline__ void load(uint8_t const* staging, uint64_t at) {
    if constexpr (C::kFloatOut) {
      float4 v = __ldcg(reinterpret_cast<float4 const*>(staging + at * 4));
      packets_[0].first = __float_as_uint(v.x), packets_[0].second = __float_as_uint(v.y);
      packets_[kPairs - 1].first = __float_as_uint(v.z), packets_[kPairs - 1].second = __float_as_uint(v.w);
    } else {
      uint2 v = __ldcg(reinterpret_cast<uint2 const*>(staging + at * 2));
      packets_[0].first = v.x, packets_[0].second = v.y;
    }
  }
  __device__ __forceinline__ void look(uint64_t const* packets, uint64_t at) {
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) packets_[i] = ptx::load_packets(packets + at / (C::kFloatOut ? 1 : 2) + 2 * i);
  }
  __device__ __forceinline__ bool seen(uint32_t flag) const { return packets_[0].are(flag) && packets_[kPairs - 1].are(flag); }
  __device__ __forceinline__ void add_to(float (&total)[4]) const {
    if constexpr (C::kFloatOut) {
      total[0] += __uint_as_float(packets_[0].first), total[1] += __uint_as_float(packets_[0].second);
      total[2] += __uint_as_float(packets_[kPairs - 1].first), total[3] += __uint_as_float(packets_[kPairs - 1].second);
    } else {
      C::Pair::add(total[0], total[1], packets_[0].first);
      C::Pair::add(total[2], total[3], packets_[0].second);
    }
  }

 private:
  static constexpr uint32_t kPairs = C::kFloatOut ? 2 : 1;
  ptx::Packets packets_[kPairs];
};

}  // namespace entwine::sm90
