// What the workers of all ops share: one rank's view of a call, and a worker's own state.
#pragma once

#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "host/call.h"
#include "host/epilogue.h"
#include "host/tile_math.h"
#include "host/trace.h"

namespace entwine::host {

// Random stalls, on request, to shake out orders that a quiet machine never shows.
class Stalls {
 public:
  Stalls(Seat const& seat, uint32_t worker)
      : most_us_(seat.spec->stall_us), random_(seat.spec->stall_seed * 7919 + seat.epoch * 613 + seat.rank * 67 + worker) {}
  void maybe() {
    if (most_us_ == 0) return;
    auto time = std::chrono::microseconds(random_() % (most_us_ + 1));
    if (time.count() != 0) std::this_thread::sleep_for(time);
  }

 private:
  uint32_t most_us_;
  std::minstd_rand random_;
};

template <typename In>
struct Worker {
  Worker(Seat const& seat, uint32_t index)
      : product(seat.spec->geometry, seat.spec->transpose_w),
        stalls(seat, index),
        trace(seat.notes == nullptr ? nullptr : &(*seat.notes)[index]),
        index(index) {
    if (seat.spec->products.gated) up.emplace(seat.spec->geometry, seat.spec->transpose_w);
  }
  TileProduct<In> product;
  std::optional<TileProduct<In>> up;  // gated: the tile's other half
  Stalls stalls;
  Tracer trace;
  uint32_t index;
};

// One rank's part of one call. run() is called once by each of its workers.
template <typename In, typename Out>
class RankPart {
 protected:
  explicit RankPart(Seat const& seat)
      : seat_(seat), g_(seat.spec->geometry), raster_{g_.chunk_rows(), g_.cols(), seat.spec->plan.raster} {}

  uint32_t rank() const { return seat_.rank; }
  Arena& own() const { return arena(rank()); }
  Arena& arena(uint32_t rank) const { return *(*seat_.arenas)[rank]; }

  // All-gather: the product that a tile is of; and in its columns the tile's first. The other ops' tiles are of all products.
  uint32_t product(schedule::Tile const& t) const { return seat_.spec->gather() ? place(t).product : 0; }
  uint32_t first_col(schedule::Tile const& t) const { return (seat_.spec->gather() ? place(t).block : t.col) * tile_cols(); }
  uint32_t cols(schedule::Tile const& t) const {
    return schedule::smaller(tile_cols(), seat_.spec->n(product(t)) - first_col(t));
  }

  // Where `t` goes in a y whose first row of it is `row`; rows are `pitch` apart.
  Out* y(schedule::Tile const& t, size_t row) const {
    return static_cast<Out*>(seat_.operands.y_of(product(t))) + row * pitch(t) + first_col(t);
  }
  size_t pitch(schedule::Tile const& t) const { return seat_.spec->n(product(t)); }

  // Not all-gather: the rows of `t` in a product's x, which has those of all chunks.
  Rows<In> rows_of_whole(schedule::Tile const& t, uint32_t product) const {
    size_t k = seat_.spec->k(product), all = g_.all_rows(), batch = g_.batch_of(t.row);
    size_t row = size_t(t.owner) * g_.m_shard + g_.first_row(t.row);
    auto x = static_cast<In const*>(seat_.operands.x_of(product)) + batch * all * k;
    if (seat_.spec->transpose_x) return {x + row, 1, all};
    return {x + row * k, k, 1};
  }

  // Adds a product's share to the sums of `t`, by its rows of that product's x.
  void add_product(Worker<In>& worker, schedule::Tile const& t, uint32_t product, Rows<In> const& rows) const {
    add_product(worker.product, t, product, rows);
  }
  void add_product(TileProduct<In>& sums, schedule::Tile const& t, uint32_t product, Rows<In> const& rows) const {
    using W = typename TileProduct<In>::W;
    CallSpec const& spec = *seat_.spec;
    sums.multiply(rows, g_.rows(t), static_cast<W const*>(seat_.operands.w_of(product)), spec.n(product), spec.k(product),
                  first_col(t), cols(t));
  }
  void scale(Worker<In>& worker, schedule::Tile const& t) const {
    if (seat_.operands.scale == nullptr) return;
    float factor = seat_.operands.scale[product(t)];
    uint32_t count = cols(t);
    for (uint32_t i = 0; i < g_.rows(t); ++i)
      for (uint32_t j = 0; j < count; ++j) worker.product.row(i)[j] *= factor;
  }

  // Adds the bias to the sums of `t`, which are whole, and activates them.
  void finish(Worker<In>& worker, schedule::Tile const& t) const {
    float const* bias = seat_.operands.bias_of(product(t));
    schedule::Activation activation = seat_.spec->activation[product(t)];
    if (bias == nullptr && activation == schedule::Activation::kNone) return;
    uint32_t first = first_col(t), count = cols(t);
    for (uint32_t i = 0; i < g_.rows(t); ++i)
      for (uint32_t j = 0; j < count; ++j) {
        float& sum = worker.product.row(i)[j];
        sum = activated(bias == nullptr ? sum : sum + bias[first + j], activation);
      }
  }

  // Gated: multiplies the sums of `t`, which are finished, by those of up.
  void gate(Worker<In>& worker, schedule::Tile const& t, Rows<In> const& rows) const {
    if (!worker.up) return;
    worker.up->clear();
    add_product(*worker.up, t, 1, rows);
    float const* bias = seat_.operands.bias_of(1);
    uint32_t first = first_col(t), count = cols(t);
    for (uint32_t i = 0; i < g_.rows(t); ++i)
      for (uint32_t j = 0; j < count; ++j) {
        float sum = worker.up->row(i)[j];
        worker.product.row(i)[j] *= bias == nullptr ? sum : sum + bias[first + j];
      }
  }

  // Rounds the sums of `t` to `out`, whose rows are `pitch` elements apart.
  void store(Worker<In>& worker, schedule::Tile const& t, Out* out, size_t pitch) const {
    uint32_t count = cols(t);
    for (uint32_t i = 0; i < g_.rows(t); ++i)
      for (uint32_t j = 0; j < count; ++j) out[i * pitch + j] = from_float<Out>(worker.product.row(i)[j]);
  }

  // Tells `destination` that what its word `index` of this rank stands for has landed.
  void raise(Worker<In>& worker, uint32_t destination, uint32_t index) const {
    worker.stalls.maybe();
    Arena& there = arena(destination);
    there.signal(schedule::signal_word(rank(), there.layout().words_per_source, index))
        .store(schedule::signal_value(seat_.epoch));
    there.bell().ring();
  }

  bool raised(uint32_t source, uint32_t index) const {
    uint32_t seen = own().signal(schedule::signal_word(source, own().layout().words_per_source, index)).load();
    return schedule::signal_reached(seen, schedule::signal_value(seat_.epoch));
  }

  // Sleeps until `source` has raised word `index` here, for the sake of tile `t`. False: the call is off.
  bool await(uint32_t source, uint32_t index, schedule::Tile const& t) const {
    bool in_time = own().bell().wait(seat_.spec->timeout, [&] { return raised(source, index) || seat_.off->load(); });
    if (in_time) return raised(source, index);
    std::ostringstream why;
    why << "entwine_jax." << seat_.spec->name << ": rank " << rank() << " waited " << seat_.spec->timeout.count() / 1e3
        << " s for rank " << source << " at tile (row " << t.row << ", column " << t.col << ") of rank " << t.owner
        << "'s chunk in epoch " << seat_.epoch << " and gave up";
    seat_.give_up(why.str());
    return false;
  }

  Seat const& seat_;
  schedule::Geometry g_;
  schedule::Raster raster_;

 private:
  // Of y, in a tile.
  uint32_t tile_cols() const { return seat_.spec->products.gated ? g_.tile_n / 2 : g_.tile_n; }
  schedule::Products::Place place(schedule::Tile const& t) const { return seat_.spec->products.find(t.col, g_.tile_n); }
};

}  // namespace entwine::host
