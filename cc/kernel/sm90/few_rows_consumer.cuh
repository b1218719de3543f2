// Consumers for few rows: two warpgroups, each with 64 of the tile's columns and all rows. They send the own chunk of x to the
// ranks that need it (few_rows_gather.cuh), multiply, trade slices' sums within the cluster, and exchange sums with the peers.
//
// Sums stay as wgmma leaves them until y is stored: of an octet of rows a thread has two rows of two columns, eight apart. So
// it finds another CTA's or rank's sums of the same places under its own number, and a warp's lie one after the other.
#pragma once

#include "kernel/ptx/cluster.cuh"
#include "kernel/ptx/matrix.cuh"
#include "kernel/ptx/memory_order.cuh"
#include "kernel/ptx/wgmma.cuh"
#include "kernel/sm90/epilogue.cuh"
#include "kernel/sm90/few_rows_packets.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

template <class C>
class FewRowsConsumer {
 public:
  __device__ __forceinline__ FewRowsConsumer(FewRowsCta<C> const& cta, uint32_t thread)
      : cta_(cta), thread_(thread), slices_log2_(31 - __clz(cta.params.shape.slices)) {
    if constexpr (!kPlain) {  // worked out while w is on its way
      if (thread < C::kRows) ptx::store_shared(cta.home(thread), y_row(thread) << 8 | owner(thread));
      sync();
    }
  }

  __device__ __forceinline__ void multiply() {
    if constexpr (C::kFloat8) {
      if (cta_.params.e5m2) return multiply_as<Operands::kE5m2>();
    }
    multiply_as<C::kOperands>();
  }

  // Sends each octet's sums to the CTA that finishes it.
  __device__ __forceinline__ void trade() {
    uint32_t portion_bytes = portion_octets() * cta_.params.shape.slices * kOctetSumsBytes;
    if (thread_ == 0 && portion_bytes != 0) ptx::mbarrier_arrive_expect(cta_.sums_come(), portion_bytes);
    if (tiles_ != 0) ptx::mbarrier_wait(cta_.sums_read(), (tiles_ - 1) & 1);
    ++tiles_;
#pragma unroll
    for (uint32_t octet = 0; octet < C::kOctets; ++octet) {
      if (octet >= cta_.params.shape.octets) break;
      ptx::send_to_cta(sums_at(cta_.slice, octet >> slices_log2_), cta_.sums_come(), octet & (cta_.params.shape.slices - 1),
                       &acc_[octet * 4]);
    }
  }

  // After finish(): a warp no longer needs what other CTAs may write over, all of which go on to the next tile.
  __device__ __forceinline__ void tell_read() const {
    __syncwarp();
    uint32_t lane = thread_ % 32;
    if (lane < cta_.params.shape.slices) ptx::mbarrier_arrive_at_cta(cta_.sums_read(), lane);
  }

  // Octets of this CTA's portion, kPass at a time: exchanges with peers, adds the bias, activates, rounds, stores y.
  __device__ __forceinline__ void finish(uint32_t tile) const {
    uint32_t octets = portion_octets();
    if (octets == 0) return;
    ptx::mbarrier_wait_cluster(cta_.sums_come(), (tiles_ - 1) & 1);
    float sums[kPass][4];
    if constexpr (!C::kGather) {
      for (uint32_t first = 0; first < octets; first += kPass) {
        add_slices(first, octets - first, sums);
        send(tile, first, octets - first, sums);
      }
      if (!as_packets()) await_sums(tile);
    }
    for (uint32_t first = 0; first < octets; first += kPass) {
      if (C::kGather || octets > kPass) add_slices(first, octets - first, sums);
      if constexpr (!C::kGather) receive(tile, first, octets - first, sums);
      store_y(tile, first, octets - first, sums);
    }
  }

 private:
  static constexpr bool kPlain = !C::kGather && !C::kScatter;  // rows are y's
  static constexpr uint32_t kNoRow = ~0u;
  // Fewer where eight would spill.
  static constexpr uint32_t kPass = schedule::smaller(C::kOctets, C::kPackets&& C::kFloatOut ? 4 : 8);

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
      ptx::mbarrier_wait(cta_.full(at_.stage), at_.phase);
      if constexpr (C::kGather)
        if (!cta_.resident()) ptx::mbarrier_wait(cta_.full_x(at_.stage), at_.phase);
      uint64_t w =
          ptx::wgmma_descriptor(cta_.w(at_.stage) + thread_ / 128 * 64 * kBlockBytes, C::kTransposedW ? 16 : kImageBytes, 1024);
      uint64_t x = ptx::wgmma_descriptor(cta_.x(cta_.resident() ? block : at_.stage), 16, 1024);
      pin();
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < static_cast<int>(kBlockBytes) / 32; ++i)
        ptx::wgmma_step<kOperands, 0, C::kTransposedW ? 0 : 1, true>(acc_, w + i * ((C::kTransposedW ? 32 : 2048) >> 4),
                                                                     x + i * (32 >> 4), true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      pin();
      if (thread_ % 32 == 0) ptx::mbarrier_arrive(cta_.empty(at_.stage));
      at_.next(cta_.params.stages);
    }
  }

  // The portion has octets slice, slice + slices and so on.
  __device__ __forceinline__ uint32_t portion_octets() const {
    uint32_t all = cta_.params.shape.octets;
    return all <= cta_.slice ? 0 : ((all - 1 - cta_.slice) >> slices_log2_) + 1;
  }
  __device__ __forceinline__ uint32_t octet_of(uint32_t i) const { return (i << slices_log2_) + cta_.slice; }
  // Where slice `slice` leaves this thread's sums of octet `i` of a CTA's portion.
  __device__ __forceinline__ uint32_t sums_at(uint32_t slice, uint32_t i) const {
    return cta_.sums() + ((i << slices_log2_) + slice) * kOctetSumsBytes + thread_ * 16;
  }

  // Of `octets` octets from `first` on, as many as a pass has.
  __device__ __forceinline__ void add_slices(uint32_t first, uint32_t octets, float (&sums)[kPass][4]) const {
    FewRowsParams const& p = cta_.params;
#pragma unroll
    for (uint32_t i = 0; i < kPass; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) sums[i][e] = 0;
    for (uint32_t slice = 0; slice < p.shape.slices; ++slice) {
      float4 v[kPass];  // of octets that there aren't, anything
#pragma unroll
      for (uint32_t i = 0; i < kPass; ++i)
        v[i] = ptx::load_shared_f32x4(sums_at(slice, first + schedule::smaller(i, octets - 1)));
#pragma unroll
      for (uint32_t i = 0; i < kPass; ++i)
        sums[i][0] += v[i].x, sums[i][1] += v[i].y, sums[i][2] += v[i].z, sums[i][3] += v[i].w;
    }
    if constexpr (C::kFloat8) {
      float scale = __ldg(p.scale);
#pragma unroll
      for (uint32_t i = 0; i < kPass; ++i)
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) sums[i][e] *= scale;
    }
  }

  __device__ __forceinline__ bool as_packets() const { return C::kPackets && cta_.params.shape.packets; }

  // Who adds up this thread's rows of octet `i` of the portion: a bit for each rank.
  __device__ __forceinline__ uint32_t adders(uint32_t i) const {
    uint32_t rows = cta_.params.shape.rows, row = octet_of(i) * schedule::kOctet + thread_ % 4 * 2;
    if (row >= rows) return 0;
    if constexpr (!C::kScatter) return ~0u;
    uint32_t first = ptx::load_shared(cta_.home(row)), second = row + 1 < rows ? ptx::load_shared(cta_.home(row + 1)) : first;
    return 1u << first % 256 | 1u << second % 256;
  }
  // In values: where `source` leaves this thread's sums of octet `i` with `keeper`, and how far apart octets are.
  __device__ __forceinline__ uint64_t place(uint32_t keeper, uint32_t source, uint32_t tile, uint32_t i) const {
    schedule::FewRows const& s = cta_.params.shape;
    uint32_t octet = (schedule::peer_slot(keeper, source) * s.tiles + tile) * s.octets + octet_of(i);
    return (uint64_t(octet) * C::kConsumerThreads + thread_) * 4;
  }
  __device__ __forceinline__ uint32_t step() const { return (C::kConsumerThreads * 4) << slices_log2_; }

  __device__ __forceinline__ void send(uint32_t tile, uint32_t first, uint32_t octets, float const (&sums)[kPass][4]) const {
    FewRowsParams const& p = cta_.params;
    uint32_t adders[kPass], flag = schedule::signal_value(cta_.epoch);
#pragma unroll
    for (uint32_t i = 0; i < kPass; ++i) adders[i] = i < octets ? this->adders(first + i) : 0;
    for (uint32_t peer = 0; peer < p.shape.ranks; ++peer) {
      if (peer == p.rank) continue;
      uint64_t to = place(peer, p.rank, tile, first);
      uint8_t* staging = cta_.staging(peer);
      uint64_t* packets = cta_.packets(peer);
#pragma unroll
      for (uint32_t i = 0; i < kPass; ++i) {
        if ((adders[i] >> peer & 1) == 0) continue;
        if (as_packets())
          send_packets<C>(packets, to + i * step(), sums[i], flag);
        else
          store(staging, to + i * step(), sums[i]);
      }
    }
  }

  // Signals what has been stored, and waits for what the peers store.
  __device__ __forceinline__ void await_sums(uint32_t tile) const {
    FewRowsParams const& p = cta_.params;
    sync();
    uint32_t word = tile * p.shape.slices + cta_.slice;
    if (thread_ < p.shape.ranks && thread_ != p.rank) {
      ptx::store_release_system(cta_.signal(thread_, p.rank, word), schedule::signal_value(cta_.epoch));
      wait_for_peer(cta_, cta_.signal(p.rank, thread_, word), thread_, cta_.slice, tile);
    }
    sync();
  }

  // Adds the peers' sums to the own ones, in rank order. All loads of a source's are on their way at once.
  __device__ __forceinline__ void receive(uint32_t tile, uint32_t first, uint32_t octets, float (&sums)[kPass][4]) const {
    FewRowsParams const& p = cta_.params;
    uint32_t mine = 0;  // octets with rows that this rank adds
#pragma unroll
    for (uint32_t i = 0; i < kPass; ++i) mine |= i < octets && (adders(first + i) >> p.rank & 1) ? 1u << i : 0;
    float total[kPass][4] = {};
    uint8_t const* staging = cta_.staging(p.rank);
    uint64_t const* packets = cta_.packets(p.rank);
    for (uint32_t source = 0; source < p.shape.ranks; ++source) {
      if (source == p.rank) {
#pragma unroll
        for (uint32_t i = 0; i < kPass; ++i)
#pragma unroll
          for (uint32_t e = 0; e < 4; ++e) total[i][e] += C::kScatter ? sums[i][e] : rounded(sums[i][e]);
        continue;
      }
      uint64_t at = place(p.rank, source, tile, first);
      ptx::Packets from[kPass][kSumPairs<C>];
      if (as_packets()) {
        await_packets(
            cta_, mine, source, tile, [&](uint32_t i) { return packets + (at + i * step()) / kValuesPerPacket<C>; }, from);
      } else {
#pragma unroll
        for (uint32_t i = 0; i < kPass; ++i)
          if ((mine >> i & 1) != 0) load_sums<C>(staging, at + i * step(), from[i]);
      }
#pragma unroll
      for (uint32_t i = 0; i < kPass; ++i)
        if ((mine >> i & 1) != 0) add_sums<C>(from[i], total[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kPass; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) sums[i][e] = total[i][e];
  }

  // What the peers add, so that all get the same bits.
  static __device__ __forceinline__ float rounded(float v) {
    if constexpr (C::kFloatOut)
      return v;
    else
      return C::Pair::unpack(C::Pair::pack(v, v)).x;
  }

  static __device__ __forceinline__ void store(uint8_t* to, uint64_t at, float const (&v)[4]) {
    if constexpr (C::kFloatOut)
      *reinterpret_cast<float4*>(to + at * 4) = make_float4(v[0], v[1], v[2], v[3]);
    else
      *reinterpret_cast<uint2*>(to + at * 2) = make_uint2(C::Pair::pack(v[0], v[1]), C::Pair::pack(v[2], v[3]));
  }

  // By way of shared memory, where the octets' sums were: a warp stores a row's columns, four a thread.
  __device__ __forceinline__ void store_y(uint32_t tile, uint32_t first, uint32_t octets, float const (&sums)[kPass][4]) const {
    sync();  // all have read them
    uint32_t column = thread_ / 32 * 16 + thread_ % 32 / 4, row = thread_ % 4 * 2;
#pragma unroll
    for (uint32_t i = 0; i < kPass; ++i) {
      if (i >= octets) break;
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) ptx::store_shared_f32(y_place(first + i, row + e % 2, column + e / 2 * 8), sums[i][e]);
    }
    sync();
    FewRowsParams const& p = cta_.params;
    uint32_t in_tile = thread_ % 32 * 4, to = tile * C::kTileN + in_tile;
    if (to >= p.shape.n) return;  // n is a multiple of 4
    float4 bias =
        p.epilogue.bias == nullptr ? make_float4(0, 0, 0, 0) : __ldg(reinterpret_cast<float4 const*>(p.epilogue.bias + to));
    uint32_t end = first + schedule::smaller(octets, kPass), row_in_octet = thread_ / 32;
    constexpr uint32_t kAtOnce = schedule::smaller(kPass, 4);
    for (uint32_t i = first; i < end; i += kAtOnce) {
      float4 v[kAtOnce];
      uint32_t y[kAtOnce];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        uint32_t octet = schedule::smaller(i + j, end - 1), row = octet_of(octet) * schedule::kOctet + row_in_octet;
        v[j] = ptx::load_shared_f32x4(y_place(octet, row_in_octet, in_tile));
        bool inside = i + j < end && row < p.shape.rows;
        if constexpr (!kPlain) {
          row = ptx::load_shared(cta_.home(row));
          inside = inside && row % 256 == p.rank;
          row /= 256;
        }
        y[j] = inside ? row : kNoRow;
      }
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        if (y[j] == kNoRow) continue;
        float values[4] = {v[j].x + bias.x, v[j].y + bias.y, v[j].z + bias.z, v[j].w + bias.w};
        activate<4>(p.epilogue, values);
        uint64_t at = uint64_t(y[j]) * p.shape.n + to;
        if constexpr (C::kFloatOut)
          *reinterpret_cast<float4*>(p.y + at * 4) = make_float4(values[0], values[1], values[2], values[3]);
        else
          *reinterpret_cast<uint2*>(p.y + at * 2) =
              make_uint2(C::Pair::pack(values[0], values[1]), C::Pair::pack(values[2], values[3]));
      }
    }
  }
  // Rows of 512 bytes; columns are turned so that a warp's rows meet other banks.
  __device__ __forceinline__ uint32_t y_place(uint32_t i, uint32_t row, uint32_t column) const {
    return sums_at(0, i) - thread_ * 16 + row * (C::kTileN * 4) + (column ^ row / 2 * 8) * 4;
  }

  // All-gather: rows are (chunk, batch, row), y's are (batch, chunk, row). Reduce-scatter: rows are (batch, chunk, row), y's
  // (batch, row), where their owner has them. All-reduce: rows are rows.
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
  __device__ __forceinline__ uint32_t owner(uint32_t row) const {
    return C::kScatter ? row / cta_.params.shape.m_shard % cta_.params.shape.ranks : cta_.params.rank;
  }

  FewRowsCta<C> const& cta_;
  uint32_t thread_, slices_log2_;
  StageCursor at_{0, 0};
  uint32_t tiles_ = 0;  // traded
  float acc_[C::kRows / 2];
};

}  // namespace entwine::sm90
