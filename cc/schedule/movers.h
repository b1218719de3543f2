// Strategy "resident": some workers (on sm_90 clusters) only move finished bytes to the peers, in one launch with those that
// multiply. They are called movers.
//
// Roles come by ticket, a worker's first claim of the tile queue, never by an index: ticket 0 multiplies, tickets 1 .. `count`
// move, the others multiply. Positions 1 .. `count` are no tiles. Who comes upon one of them later, since few workers were
// there to claim it first, claims on. Movers that find nothing left to move multiply, too.
//
// So that something moves with any number of workers >= 1, ticket 0's worker has an idle half that moves if no mover surely
// exists. Position 1 is the second one to be claimed: either by another worker, whose ticket it is, and that one is a mover, or
// by ticket 0's own, and then its idle half moves. Ticket 0's second claim tells which, and waits for nobody: the tile before
// it is a partial sum, or of the own rows.
//
// Tiles leave what they have finished in their own rank's memory, a *flag* of that rank tells of it, and a mover takes it from
// there to the peer's staging, where it is signalled as if the tile had put it there. What waits for a peer waits for that.
//
// Why it can't deadlock. Movers claim jobs from one queue in MoveOrder, which is the order of tiles: the jobs of a tile come
// before those of tiles at later positions. A mover waits for its job's tile only, and signals what has landed before it waits.
// Call 2 p the level of the tile at position p, and 2 p + 1 that of its jobs. A job waits for its tile, at the level below. A
// tile at p waits for jobs of tiles at positions < p of the peers (tile_order.h), at lower levels. So take the lowest level at
// which anybody waits: if for a tile, that is claimed by somebody who isn't waiting at a lower level, hence gets done; if for a
// job, all jobs before it are of lower levels, so no mover waits at one of them, and there is a mover: it gets done. Gathered
// rows are there from the start, and pushing them waits for nobody.
#pragma once

#include "schedule/tile_order.h"

namespace entwine::schedule {

struct Movers {
  uint32_t count;  // 0: none, every position is a tile

  ENTWINE_HOST_DEVICE constexpr bool reserved(uint32_t position) const { return position - 1 < count; }
  // Which tile of the order; past its end for positions past the queue's. Not of a reserved position.
  ENTWINE_HOST_DEVICE constexpr uint32_t tile(uint32_t position) const { return position == 0 ? 0 : position - count; }
  // The last claim of a call, if each worker claims until it gets a position past the tiles.
  constexpr uint32_t last_claim(uint32_t tiles, uint32_t workers) const { return tiles + count + workers - 1; }
};

// What is moved: of reduce-scatter and all-reduce every tile of another rank's chunk to that rank, and of an all-reduce
// (`results`) every finished tile of the own chunk to each peer, right after what stands before it in the order of tiles.
struct MoveOrder {
  Raster raster;
  uint32_t ranks, rank, lead;
  bool results;

  struct Job {
    uint32_t peer, index;  // where to; the tile's number in the raster of its owner's chunk
    bool result;           // the owner is this rank, else the peer
  };
  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return (ranks - 1) * raster.size() * (results ? 2 : 1); }
  ENTWINE_HOST_DEVICE constexpr Job at(uint32_t job) const {
    uint32_t peers = ranks - 1, remote = raster.size() * peers;
    if (!results) return of(job, false);
    uint32_t ahead = smaller(larger(lead, peers), remote);
    if (job < ahead) return of(job, false);
    // As ReduceScatterOrder: groups of an own tile, which has as many jobs as there are peers, and a remote one for each peer.
    uint32_t groups = (remote - ahead) / peers, i = job - ahead, both = 2 * peers;
    if (i < groups * both) {
      uint32_t g = i / both, j = i - g * both;
      return j < peers ? of(g * peers + j, true) : of(ahead + g * peers + j - peers, false);
    }
    i -= groups * both;
    uint32_t left = remote - ahead - groups * peers;
    return i < left ? of(ahead + groups * peers + i, false) : of(groups * peers + i - left, true);
  }

 private:
  // Round the peers, rank+1 first, the tile's index outermost; that is remote_ordinal().
  ENTWINE_HOST_DEVICE constexpr Job of(uint32_t ordinal, bool result) const {
    uint32_t peers = ranks - 1, index = ordinal / peers;
    return {(rank + 1 + (ordinal - index * peers)) % ranks, index, result};
  }
};

// Where a rank keeps what it has finished and movers have yet to take: a set of a chunk's tiles for each owner, by peer_slot(),
// and then, of an all-reduce, one of its own.
ENTWINE_HOST_DEVICE constexpr uint32_t outgoing_set(uint32_t ranks, uint32_t rank, uint32_t owner) {
  return owner == rank ? ranks - 1 : peer_slot(rank, owner);
}

}  // namespace entwine::schedule
