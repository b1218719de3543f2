// Mover (strategy "resident"): one thread a CTA of the clusters whose ticket is a mover's, through a ring in place of all that
// tiles need; and the idle one of ticket 0's cluster, through what pusher and collector have beside tiles, if that cluster
// claims position 1. Both CTAs' movers are done before their cluster takes tiles. The order of jobs, and why nothing deadlocks:
// schedule/movers.h.
//
// Reduce-scatter and all-reduce: a job is a tile for one peer, which lies as its four parts do, one after the other, both here
// and there. Its parts' flags are looked at together, and its four signals raised after one fence: looks, claims and fences
// take a microsecond each. All-gather: a job is a pusher's unit.
#pragma once

#include "kernel/sm90/collector.cuh"
#include "kernel/sm90/mover_ring.cuh"
#include "kernel/sm90/outgoing.cuh"
#include "kernel/sm90/pusher.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

// Tiles, to their owners and, of an all-reduce, from there to all. The note of a tile's last slot is where it is signalled.
template <class C>
__device__ __forceinline__ void move_tiles(Cta<C> const& cta, MoverRing<C> ring, Tracer<C>& trace) {
  Params const& p = cta.params;
  constexpr uint32_t kParts = schedule::kSm90Parts;
  uint32_t value = schedule::signal_value(cta.epoch);
  auto landed = [&](uint64_t note) {
    auto* words = reinterpret_cast<uint32_t*>(note);
    ptx::fence_system();
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) ptx::store_relaxed_system(words + part, value);
    trace.mark(schedule::Mark::kMoved, 0);
  };
  schedule::MoveOrder order{p.raster, p.ranks, p.rank, p.lead, C::kReplicate};
  uint32_t* queue = &cta.control()->counts[cta.parity()].landed;
  for (uint32_t number = ptx::add_relaxed(queue, 1), next; number < order.size(); number = next) {
    next = ptx::add_relaxed(queue, 1);  // on its way meanwhile
    schedule::MoveOrder::Job job = order.at(number);
    uint32_t set = schedule::outgoing_set(p.ranks, p.rank, job.result ? p.rank : job.peer), parts = kParts;
    if constexpr (C::kReplicate) {
      if (job.result) {  // what is outside of y isn't awaited by anybody
        schedule::Raster::Cell cell = p.raster.at(job.index);
        while (parts > 0 && inside<C>(p, {p.rank, cell.row, cell.col}, parts - 1).images == 0) --parts;
        if (parts == 0) continue;
      }
    }
    uint32_t const* flags = outgoing_flag(cta, set, job.index, 0);
    auto ready = [&] {
      bool all = true;
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) all &= schedule::signal_reached(ptx::load_relaxed(flags + part), value);
      return all;
    };
    if (!ready()) {
      ring.drain(landed);  // signalled before this waits
      while (!ready()) __nanosleep(40);
    }
    ptx::fence_gpu();
    ptx::fence_proxy_async_global();
    if constexpr (C::kTraced) {
      schedule::Raster::Cell cell = p.raster.at(job.index);
      trace.mark(schedule::Mark::kMoving, pack_tile({job.peer, cell.row, cell.col}));
    }

    uint8_t const* from = outgoing(cta, set, job.index, 0);
    uint8_t* to;
    uint32_t* words;
    if (C::kReplicate && job.result) {
      to = result(cta, job.peer, p.rank, job.index, 0);
      words = result_word(cta, job.peer, p.rank, job.index, 0);
    } else {
      uint64_t tile = uint64_t(schedule::peer_slot(job.peer, p.rank)) * p.raster.size() + job.index;
      to = cta.staging(job.peer) + tile * kParts * C::kPartBytes;
      words = cta.signal(job.peer, p.rank, schedule::partial_signal(job.index, 0, kParts));
    }
    for (uint32_t left = parts * C::kPartBytes; left != 0;) {
      uint32_t bytes = schedule::smaller(left, ring.slot_bytes());
      left -= bytes;
      ring.move(from, to, nullptr, bytes, left == 0 ? reinterpret_cast<uint64_t>(words) : 0, landed);
      from += bytes;
      to += bytes;
    }
  }
  ring.drain(landed);
}

// The own chunk of x, to all. The note of a unit's last slot is its row block, plus one.
template <class C>
__device__ __forceinline__ void move_rows(Cta<C> const& cta, MoverRing<C> ring, Tracer<C>& trace) {
  Params const& p = cta.params;
  Gather const& g = p.gather;
  auto landed = [&](uint64_t note) {
    trace.mark(schedule::Mark::kPushed, static_cast<uint32_t>(note) - 1);
    count_unit(cta, static_cast<uint32_t>(note) - 1);
  };
  schedule::PushOrder order{p.ranks, p.rank, g.shape.blocks(), g.units_per_block};
  uint32_t* queue = &cta.control()->push[cta.parity()];
  for (uint32_t number = ptx::add_relaxed(queue, 1), next; number < order.size(); number = next) {
    next = ptx::add_relaxed(queue, 1);  // on its way meanwhile
    schedule::PushOrder::Unit u = order.at(number);
    uint64_t start = uint64_t(u.piece) * kUnitBytes, at = g.shape.offset(u.row) + start, block = g.shape.block_bytes(u.row);
    uint64_t note = (u.destination << 24 | u.row) + 1;
    if (start >= block) {  // of a short block
      landed(note);
      continue;
    }
    uint8_t const* from = g.own + at;
    uint8_t* to =
        cta.staging(u.destination) + g.staging_offset + schedule::peer_slot(u.destination, p.rank) * g.shape.chunk_bytes() + at;
    uint8_t* copy = nullptr;
    if (u.first && g.whole != nullptr) copy = g.whole + g.shape.whole_offset(u.row, p.rank, p.ranks) + start;
    for (uint32_t left = block - start < kUnitBytes ? uint32_t(block - start) : uint32_t(kUnitBytes); left != 0;) {
      uint32_t bytes = schedule::smaller(left, ring.slot_bytes());
      left -= bytes;
      ring.move(from, to, copy, bytes, left == 0 ? note : 0, landed);
      from += bytes;
      to += bytes;
      if (copy != nullptr) copy += bytes;
    }
  }
  ring.drain(landed);
}

// The fourth warp's first work, before it schedules, collects or pushes. Movers' clusters: when CTA 0's is done, both CTAs'
// memory is free for tiles. Ticket 0's CTA 1 is told by its scheduler whether it moves.
template <class C>
__device__ __forceinline__ void move_first(Cta<C> const& cta, Tracer<C>& trace) {
  using S = Shared<C>;
  S const& shared = cta.shared;
  bool wide = cta.params.movers.reserved(cta.first_claim);
  if (!wide) {
    if (cta.params.movers.count == 0 || cta.first_claim != 0 || cta.rank_in_cluster == 0) return;
    ptx::mbarrier_wait_cluster(shared.mover_told(), 0);
    if (ptx::load_shared(shared.mover_word()) == 0) return;
  }
  MoverRing<C> ring(shared, wide ? shared.base : shared.piece(0), wide ? S::kMoverSlotBytes : S::kSmallSlotBytes);
  if constexpr (C::kGather)
    move_rows(cta, ring, trace);
  else
    move_tiles(cta, ring, trace);
  if (!wide) return;
  if (cta.rank_in_cluster == 0)
    ptx::mbarrier_wait_cluster(shared.mover_told(), 0);
  else
    ptx::mbarrier_arrive_at_cta(shared.mover_told(), 0);
}

}  // namespace entwine::sm90
