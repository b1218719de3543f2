// What travels between ranks for few rows: packets, and a thread's sums of an octet of rows, as packets or as they are.
#pragma once

#include "kernel/ptx/memory_order.cuh"
#include "kernel/sm90/few_rows_config.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

// Takes the packets of `wanted`, a bit for each of kCount places, when all are this call's: kPairs pairs from where(i) on. Each
// look is at all that have yet to come, on their way at once.
template <uint32_t kCount, uint32_t kPairs, class C, class Where>
__device__ __forceinline__ void await_packets(FewRowsCta<C> const& cta, uint32_t wanted, uint32_t peer, uint32_t tile,
                                              Where where, ptx::Packets (&packets)[kCount][kPairs]) {
  uint32_t flag = schedule::signal_value(cta.epoch);
  uint64_t start = 0;
  for (uint32_t looks = 1; wanted != 0; ++looks) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      if ((wanted >> i & 1) == 0) continue;
#pragma unroll
      for (uint32_t pair = 0; pair < kPairs; ++pair) packets[i][pair] = ptx::load_packets(where(i) + 2 * pair);
    }
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i)
      if (packets[i][0].are(flag) && packets[i][kPairs - 1].are(flag)) wanted &= ~(1u << i);
    if (looks % 256 != 0 || cta.params.timeout_ns == 0) continue;
    uint64_t now = ptx::nanoseconds();
    if (start == 0) start = now;
    if (wanted != 0 && now - start > cta.params.timeout_ns)
      give_up(cta, peer, cta.slice, tile, ptx::load_packets(where(__ffs(wanted) - 1)).first_flag, flag);
  }
}

// A thread's sums of an octet of rows: four values, `at` so many values into staging or packets' data. Of 32 bits they are two
// pairs of packets, else one.
template <class C>
constexpr uint32_t kSumPairs = C::kFloatOut ? 2 : 1;
template <class C>
constexpr uint32_t kValuesPerPacket = C::kFloatOut ? 1 : 2;

template <class C>
__device__ __forceinline__ void send_packets(uint64_t* packets, uint64_t at, float const (&v)[4], uint32_t flag) {
  uint64_t* to = packets + at / kValuesPerPacket<C>;
  if constexpr (C::kFloatOut) {
    ptx::store_packets(to, __float_as_uint(v[0]), __float_as_uint(v[1]), flag);
    ptx::store_packets(to + 2, __float_as_uint(v[2]), __float_as_uint(v[3]), flag);
  } else {
    ptx::store_packets(to, C::Pair::pack(v[0], v[1]), C::Pair::pack(v[2], v[3]), flag);
  }
}

// From staging, past L1, into the packets' data.
template <class C>
__device__ __forceinline__ void load_sums(uint8_t const* staging, uint64_t at, ptx::Packets (&packets)[kSumPairs<C>]) {
  if constexpr (C::kFloatOut) {
    float4 v = __ldcg(reinterpret_cast<float4 const*>(staging + at * 4));
    packets[0].first = __float_as_uint(v.x), packets[0].second = __float_as_uint(v.y);
    packets[1].first = __float_as_uint(v.z), packets[1].second = __float_as_uint(v.w);
  } else {
    uint2 v = __ldcg(reinterpret_cast<uint2 const*>(staging + at * 2));
    packets[0].first = v.x, packets[0].second = v.y;
  }
}

template <class C>
__device__ __forceinline__ void add_sums(ptx::Packets const (&packets)[kSumPairs<C>], float (&total)[4]) {
  if constexpr (C::kFloatOut) {
    total[0] += __uint_as_float(packets[0].first), total[1] += __uint_as_float(packets[0].second);
    total[2] += __uint_as_float(packets[1].first), total[3] += __uint_as_float(packets[1].second);
  } else {
    C::Pair::add(total[0], total[1], packets[0].first);
    C::Pair::add(total[2], total[3], packets[0].second);
  }
}

}  // namespace entwine::sm90
