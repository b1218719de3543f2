// What one collective matmul is (the same on all ranks), and one rank's seat in it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "host/arena.h"
#include "host/element.h"
#include "schedule/activation.h"
#include "schedule/group_search.h"
#include "schedule/plan.h"
#include "schedule/products.h"
#include "schedule/tile_order.h"
#include "schedule/trace_event.h"

namespace entwine::host {

constexpr uint32_t kUnitsPerBlock = 2;  // pieces in which a row block is pushed and copied

struct CallSpec {
  char const* name;  // of the op, for errors
  schedule::Op op;
  schedule::Geometry geometry;
  schedule::Plan plan;
  bool transpose_w;
  Element in, out;
  schedule::Gathering gathering{};  // x of all-gather; what reduce-scatter gathers beside, if anything
  schedule::Products products{};
  bool transpose_x = false;                                      // not all-gather: x is stored (batch, k, rows)
  schedule::Activation activation[schedule::kMaxProducts] = {};  // of each y
  uint32_t workers = 1;                                          // a rank
  Timeout timeout{0};                                            // of any one wait
  uint32_t stall_us = 0;  // a random stall of up to this before each claim and each signal
  uint64_t stall_seed = 0;
  char const* absent = "";  // for errors: why else a rank may never come to a call
  bool grouped = false;     // strategy "signal": tiles are moved in groups
  schedule::SignalPlan signal{};

  // n and k of one product.
  uint32_t n(uint32_t product) const { return schedule::columns(op, geometry, products, product); }
  uint32_t k(uint32_t product) const { return schedule::contraction(op, geometry, products, product); }
  bool gather() const { return op == schedule::Op::kAllGatherMatmul; }

  schedule::Groups groups() const {
    return schedule::make_groups(op, schedule::Target::kHost, geometry, signal, 0, element_bytes(in)).groups;
  }

  schedule::ArenaDemand demand() const {
    if (grouped) {  // a word of each group; own sums, or the peers' rows
      uint64_t bytes = gather() ? schedule::chunk_bytes(geometry, element_bytes(in)) * (geometry.ranks - 1)
                                : schedule::scratch_bytes(op, schedule::grouped(op, geometry), element_bytes(out), false);
      return {schedule::kMaxGroups, schedule::round_up(bytes, 1024)};
    }
    return schedule::arena_demand(op, geometry, schedule::kHostParts, element_bytes(gather() ? in : out), gathering,
                                  plan.movers != 0);
  }
};

// Dense, row-major, as schedule/geometry.h says.
struct Operands {
  void const* x;
  void const* w;
  void* y;
  void const* z = nullptr;   // reduce-scatter: the own chunk of what is gathered beside
  void* gathered = nullptr;  // all-gather: null if x's chunks aren't wanted together
  float const* bias = nullptr;
  float const* scale = nullptr;  // of 8-bit operands: of each product of an all-gather, else one, of their sum
  std::byte* scratch = nullptr;  // strategy "signal": schedule/tile_groups.h
  // Of the products after the first; all-gather has no other x (and, gated, no other y), the others no other y and bias.
  struct More {
    void const *x, *w;
    void* y;
    float const* bias;
  } more[schedule::kMaxProducts - 1] = {};

  void const* x_of(uint32_t product) const { return product == 0 ? x : more[product - 1].x; }
  void const* w_of(uint32_t product) const { return product == 0 ? w : more[product - 1].w; }
  void* y_of(uint32_t product) const { return product == 0 ? y : more[product - 1].y; }
  float const* bias_of(uint32_t product) const { return product == 0 ? bias : more[product - 1].bias; }
};

struct Seat {
  CallSpec const* spec;
  uint32_t rank;
  uint32_t epoch;
  std::vector<Arena*> const* arenas;  // of all ranks
  Operands operands;
  std::atomic<bool> const* off;                                     // the team has given up; looked at by whoever waits
  std::function<void(std::string)> give_up;                         // sets it, says why, and wakes all who wait
  std::vector<std::vector<schedule::TraceEvent>>* notes = nullptr;  // by worker: trace.h; null if none are taken
};

}  // namespace entwine::host
