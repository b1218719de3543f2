// A fused call's time, by going through its schedule: clusters claim tiles in the real order and load, multiply, wait, add,
// store and send them; the link and the pushers take what they are measured to take.
//
// One rank stands for all. Ranks are alike and their orders are the same but for a rotation (rank+1, rank+2, ...), so a peer's
// partial sums for this rank land when this rank's land with the peer on the other side, and the link hears as much as it says.
// And by the progress rule (schedule/tile_order.h) a tile waits only for tiles at earlier queue positions. So tiles are gone
// through in the order of their claims, and when all that a tile waits for is known.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "schedule/make_plan.h"
#include "schedule/tile_order.h"
#include "simulate/link.h"
#include "simulate/machine.h"
#include "simulate/pushes.h"
#include "simulate/spans.h"

namespace entwine::simulate {

// Of one call on one rank. The last three are means over clusters; the link's is the time that its bytes take at its rate.
struct Times {
  double us, link_us, multiply_us, wait_rows_us, wait_sums_us, wait_buffers_us;
};

class Tiles {
 public:
  Tiles(schedule::Op op, schedule::Geometry const& g, schedule::Plan const& plan, double out_bytes, double in_bytes,
        Machine const& machine, Spans* spans = nullptr)
      : op_(op),
        g_(g),
        plan_(plan),
        machine_(machine),
        spans_(spans),
        gather_(op == schedule::Op::kAllGatherMatmul),
        raster_{g.chunk_rows(), g.cols(), plan.raster},
        link_(machine.link_bytes_per_us),
        movers_(std::min(plan.movers, schedule::kSm90Clusters - 1)),
        pushes_(g, pushers(), movers_ != 0 ? machine.mover_bytes_per_us : machine.pusher_bytes_per_us, in_bytes, machine, link_,
                spans, [this](uint32_t pusher) { return movers_ != 0 ? mover_cluster(pusher) : pusher; }),
        tile_bytes_(out_bytes * schedule::staged_elements(g)) {
    schedule::cost::TileCost cost = schedule::cost::tile_cost(g.tile_m, g.tile_n);
    double slower = schedule::kSm90FlopsPerSecond * 1e-6 / machine.flops_per_us;
    k_block_us_ = cost.k_block_us * slower;
    k_blocks_ = schedule::ceil_div(static_cast<uint32_t>(g.k * in_bytes), 128);
    rest_us_ = cost.rest_us;
    bool stacked = g.tile_m == 256;
    buffers_ = gather_ || !stacked ? 2 : g.tile_n <= 192 ? 3 : 4;
    images_ = std::max(1.0, std::ceil((stacked ? g.tile_n : g.tile_n / 2) * out_bytes / 128));
    least_us_ = g.m_shard < g.tile_m ? in_bytes * g.n * g.k / cost.stream : 0;
  }

  Times run() {
    uint32_t tiles = g_.tiles();
    // The last ones move at first. Those of all-gather are done before tiles are.
    for (uint32_t cluster = 0; cluster < schedule::kSm90Clusters - movers_; ++cluster) claims_.push({0, cluster});
    for (uint32_t mover = 0; gather_ && mover < movers_; ++mover)
      claims_.push({std::max(pushes_.done(2 * mover), pushes_.done(2 * mover + 1)), mover_cluster(2 * mover)});
    for (uint32_t cta = 0; cta < 2 * movers_; ++cta) movers_free_.push({0, cta});
    state_.resize(schedule::kSm90Clusters);
    landed_.reserve(tiles);
    finished_.resize(raster_.size());
    for (uint32_t position = 0; position < tiles; ++position) {
      auto [claimed, cluster] = claims_.top();
      claims_.pop();
      claims_.push({work(position, cluster, claimed), cluster});
    }
    if (op_ == schedule::Op::kMatmulAllReduce) collect();
    if (spans_ != nullptr) {
      spans_->link_bytes = link_.bytes_by_bin();
      spans_->bin_us = Link::kBin;
    }
    double link_us = link_.busy_us(), all = schedule::kSm90Clusters;
    double us = machine_.launch_us + std::max(end_, least_us_);
    return {us, link_us, multiplied_ / all, wait_rows_ / all, wait_sums_ / all, wait_buffers_ / all};
  }

 private:
  struct Cluster {
    double consumers = 0;  // these are free for the next tile
    double storers = 0;    // these too
    double buffers = 0;    // what was stored from the C buffers has left them
  };
  using Claim = std::pair<double, uint32_t>;

  // Threads that push x.
  uint32_t pushers() const {
    return !gather_ ? 0 : movers_ != 0 ? 2 * movers_ : std::min(plan_.pushers, schedule::kSm90Clusters);
  }

  static uint32_t mover_cluster(uint32_t cta) { return schedule::kSm90Clusters - 1 - cta / 2; }
  void note(Role role, uint32_t worker, double begin, double end, schedule::Tile tile) {
    if (spans_ != nullptr) spans_->add(role, worker, begin, end, tile);
  }

  // A tile from its claim on; returns when its cluster claims the next one.
  double work(uint32_t position, uint32_t number, double claimed) {
    Cluster& cluster = state_[number];
    schedule::Tile tile = gather_ ? schedule::AllGatherOrder{raster_, g_.ranks, 0}.at(position)
                                  : schedule::ReduceScatterOrder{raster_, g_.ranks, 0, plan_.lead}.at(position);
    double posted = claimed;
    if (gather_ && tile.owner != 0) {
      posted = std::max(posted, pushes_.landed(tile.owner, tile.row));
      double from = std::max(claimed, cluster.consumers);
      wait_rows_ += std::max(0.0, posted - from);
      note(Role::kWaitRows, number, from, posted, tile);
    }
    double start = std::max(cluster.consumers, posted + machine_.load_us);
    double slower = movers_ == 0 && pushes_.pushes(number, start) ? machine_.pushing_slower : 1;
    double ready = start + k_blocks_ * k_block_us_ * slower * (1 + machine_.jitter * uneven(position)),
           storers = std::max(cluster.storers, posted);
    multiplied_ += ready - start;
    note(Role::kMultiply, number, start, ready, tile);
    // The loader asks for the next tile some k blocks ahead of its own end, and is a few ahead of the consumers.
    double ahead = std::min<double>(k_blocks_, kAhead) * k_block_us_, next = std::max({start, storers, ready - ahead});
    wait_buffers_ += std::max(0.0, cluster.buffers - ready);
    ready = std::max(ready, cluster.buffers);
    if (gather_) {
      finish(cluster, ready + rest_us_, ready + rest_us_, ready + rest_us_);
    } else if (tile.owner != 0) {
      send_partial(cluster, tile, ready, storers);
    } else {
      add_partials(cluster, number, tile, ready, storers);
    }
    return next;
  }

  void finish(Cluster& cluster, double consumers, double storers, double buffers) {
    cluster = {consumers, storers, buffers};
    end_ = std::max({end_, consumers, storers, buffers});
  }

  // A tile of somebody else's chunk, in the order of claims, which is that of their ordinals.
  void send_partial(Cluster& cluster, schedule::Tile tile, double ready, double storers) {
    double rounded = ready + rest_us_, left = rounded, landed;
    if (movers_ != 0) {
      left = std::max(rounded, storers) + machine_.store_us;
      landed_.push_back(move(left, tile));
      return finish(cluster, rounded, left, rounded);
    }
    if (plan_.transport == schedule::Transport::kPull) {
      landed = std::max(rounded, storers) + machine_.store_us;
    } else {
      // It waits for its turn: all but `pushers` - 1 of the tiles before it have landed.
      double turn = std::max({ready + rest_us_ / 2, storers, on_link_.size() < plan_.pushers ? 0 : on_link_.top()});
      left = link_.move(turn, tile_bytes_, machine_.cluster_bytes_per_us);
      landed = std::max(left, rounded) + machine_.land_us;
      on_link_.push(landed);
      if (on_link_.size() > plan_.pushers) on_link_.pop();
      // What has no buffer waits for the others to leave.
      rounded = std::max(rounded, turn + (left - turn) * std::max(0.0, 1 - buffers_ / images_));
    }
    landed_.push_back(landed);
    finish(cluster, rounded, landed, left);
  }

  // A tile that lies here from `us` on goes to a peer: when it has landed there. Jobs come in the order of tiles.
  double move(double us, schedule::Tile tile) {
    auto [free, cta] = movers_free_.top();
    double start = std::max(free, us + machine_.signal_us);
    movers_free_.pop();
    double left = link_.move(start, tile_bytes_, machine_.mover_bytes_per_us);
    movers_free_.push({left, cta});
    note(Role::kMove, mover_cluster(cta), start, left, tile);
    end_ = std::max(end_, left);
    return left + machine_.land_us;
  }

  // A tile of the own chunk.
  void add_partials(Cluster& cluster, uint32_t number, schedule::Tile tile, double ready, double storers) {
    uint32_t peers = g_.ranks - 1, index = raster_.index(tile.row, tile.col);
    double there = storers;  // when all peers' sums are
    for (uint32_t peer = 0; peer < peers; ++peer)
      there = std::max(there, landed_.at(index * peers + peer) + machine_.signal_us);
    // The first of them are fetched while the tile is multiplied, the rest as buffers become free.
    double items = images_ * peers, first = std::min(items, buffers_), rest = items - first;
    bool pull = plan_.transport == schedule::Transport::kPull && movers_ == 0;
    double fetched = fetch(there, first / images_, pull), later = fetched;
    for (double left = rest, from = std::max(ready, fetched); left > 0; left -= buffers_)
      later = from = fetch(from, std::min(left, buffers_) / images_, pull);
    wait_sums_ += std::max(0.0, fetched - ready);
    note(Role::kWaitSums, number, ready, fetched, tile);
    double rounded = std::max(std::max(ready, fetched) + rest_us_ + machine_.add_us * peers, later + rest_us_ / 2);
    if (op_ == schedule::Op::kMatmulReduceScatter) return finish(cluster, rounded, rounded, rounded);
    if (movers_ != 0) {
      for (uint32_t peer = 0; peer < peers; ++peer)
        finished_[index] = std::max(finished_[index], move(rounded + machine_.store_us, tile));
      return finish(cluster, rounded, rounded + machine_.store_us, rounded);
    }
    double left = link_.move(rounded - rest_us_ / 2, tile_bytes_ * peers, machine_.cluster_bytes_per_us);
    finished_[index] = std::max(left, rounded) + machine_.land_us;
    finish(cluster, rounded, finished_[index], left);
  }
  // When so many partial tiles are in the buffers. What a peer fetches goes over its producer's link, more slowly than stores;
  // and a peer fetches from this rank what this one fetches from the other side.
  double fetch(double us, double tiles, bool pull) {
    if (!pull) return us + machine_.store_us;
    double as_stores = tile_bytes_ * tiles * machine_.link_bytes_per_us / machine_.fetch_bytes_per_us;
    return link_.move(us, as_stores, machine_.cluster_bytes_per_us) + machine_.fetch_us;
  }

  // All-reduce: the collectors copy finished tiles to y.
  void collect() {
    schedule::CollectOrder order{raster_, g_.ranks, 0, schedule::kSm90Parts};
    std::priority_queue<double, std::vector<double>, std::greater<double>> free;
    for (uint32_t cluster = 0; cluster < schedule::kSm90Clusters; ++cluster) free.push(0);
    for (uint32_t job = 0; job < order.size(); ++job) {
      double end = std::max(free.top(), finished_[order.at(job).index] + machine_.signal_us) + images_ * machine_.collect_us;
      free.pop();
      free.push(end);
      end_ = std::max(end_, end + machine_.store_us);
    }
  }

  // From -1 to 1, the same in every run.
  static double uneven(uint32_t position) {
    uint64_t bits = (position + 1) * 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    return double(bits >> 40) / (1 << 23) - 1;
  }
  static constexpr double kAhead = 11;  // kernel/sm90/shape.h, kClaimAhead, and three stages

  schedule::Op op_;
  schedule::Geometry g_;
  schedule::Plan plan_;
  Machine machine_;
  Spans* spans_;
  bool gather_;
  schedule::Raster raster_;
  Link link_;
  uint32_t movers_;  // clusters of strategy "resident"
  Pushes pushes_;
  double tile_bytes_;
  double k_block_us_, k_blocks_, rest_us_, buffers_, images_, least_us_;

  std::vector<Cluster> state_;
  std::priority_queue<Claim, std::vector<Claim>, std::greater<Claim>> claims_;
  std::priority_queue<double, std::vector<double>, std::greater<double>> on_link_;   // when the last `pushers` landed
  std::priority_queue<Claim, std::vector<Claim>, std::greater<Claim>> movers_free_;  // when a mover takes its next job
  std::vector<double> landed_, finished_;  // partial sums by ordinal; finished own tiles by index
  double end_ = 0, multiplied_ = 0, wait_rows_ = 0, wait_sums_ = 0, wait_buffers_ = 0;
};

}  // namespace entwine::simulate
