// A team whose ranks share the GPUs that are there: rank r lives on device r % devices, with a stream and an arena of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernel/sm90.h"
#include "progress.h"

namespace teams {

// What stays the same for all ranks of one call.
struct Variant {
  entwine::schedule::Op op;
  entwine::schedule::Transport transport;
  bool transposed_w, float_out;
  uint32_t lead, pushers;
  entwine::schedule::TileShape tile;
  bool few_rows = false;  // where the rows are few, else tiles
  bool gathers = false;   // tiles: returns all of x (all-gather), or of another array that it gathers beside (reduce-scatter)
  bool finishes = false;  // with a bias and relu
  entwine::Operands operands = entwine::Operands::kBf16;
  uint32_t movers = 0;        // strategy "resident": clusters, of those that tiles have
  bool transposed_x = false;  // not all-gather: x is stored (batch, k, rows)
  uint32_t element_bytes() const { return entwine::operand_bytes(operands); }  // of x
};
std::string to_string(Variant const& variant);
std::string to_string(entwine::schedule::Geometry const& geometry);
// The geometry with the variant's tile: what is launched.
entwine::schedule::Geometry tiled(entwine::schedule::Geometry geometry, Variant const& variant);

// How many devices a team can use: those of compute capability 9.0 that reach each other's memory, from device 0 on. Loads the
// kernels on them.
int prepare_devices();

// Device memory, handed out from the front.
class Pool {
 public:
  void allocate(uint64_t bytes);
  void free();
  void clear() { used_ = 0; }
  uint8_t* take(uint64_t bytes);  // with a gap on each side
  uint8_t* base() const { return base_; }
  uint64_t used() const { return used_; }

 private:
  uint8_t* base_ = nullptr;
  uint64_t size_ = 0, used_ = 0;
};

struct Rank {
  uint32_t number;
  int device;
  cudaStream_t stream, probe;  // `probe` is for looking at a rank that hangs
  uint8_t* arena;
  float* scale;  // of 8-bit operands, by product
  Pool pool;
  uint32_t multiprocessors;  // its share of the device
  uint32_t epoch;            // of its next call
};

// Of 8-bit operands, `scale` being the first product's: each has its own.
constexpr float scale_of_product(float scale, uint32_t product) { return scale * static_cast<float>(1u << product); }

class EmulatedTeam {
 public:
  // start_epochs() comes next.
  EmulatedTeam(uint32_t ranks, int devices, entwine::schedule::ArenaLayout const& layout, uint64_t pool_bytes, float scale);
  ~EmulatedTeam();
  EmulatedTeam(EmulatedTeam const&) = delete;
  EmulatedTeam& operator=(EmulatedTeam const&) = delete;

  uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }

  // Calls back with every rank, its device being the current one.
  template <typename F>
  void each(F f) {
    for (Rank& rank : ranks_) {
      CHECK_CUDA(cudaSetDevice(rank.device));
      f(rank);
    }
  }
  // Waits for all streams.
  void finish();

  // Poisons all staging, and leaves control and signals as they are before the call with this epoch. Waits.
  void start_epochs(uint32_t epoch);
  // Poisons what a call may use of both halves. Waits.
  void poison_staging(entwine::schedule::ArenaDemand const& demand);

  // `multiprocessors` is a limit: 0 is the rank's share. The bias is used if the variant has one. `change` has the last word.
  void launch(Rank& rank, entwine::schedule::Geometry const& geometry, Variant const& variant, void const* x, void const* w,
              void* y, float const* bias, void const* z, void* gathered, uint32_t multiprocessors = 0,
              std::function<void(entwine::sm90::Call&)> const& change = {});

  // Whether all arenas are as they must be between calls: "" or what is wrong. Waits.
  std::string arena_fault();

  // Prints how far each rank has come, also while kernels hang.
  void describe() const;

 private:
  entwine::schedule::ArenaLayout layout_;
  entwine::schedule::StuckReport* stuck_;
  std::vector<Rank> ranks_;
  std::vector<uint8_t*> arenas_;
};

// A rank's chunk of what a call gathers: of the operands' type.
struct Chunk {
  uint32_t batch, rows, cols;
  ENTWINE_HOST_DEVICE uint32_t elements() const { return batch * rows * cols; }
};
// x, or for reduce-scatter an array with more rows than a chunk of y has.
inline Chunk chunk_of(entwine::schedule::Op op, entwine::schedule::Geometry const& g) {
  return {g.batch, g.m_shard + (op == entwine::schedule::Op::kAllGatherMatmul ? 0 : 167), g.k};
}

entwine::schedule::Form form_of(Variant const& variant, entwine::schedule::Geometry const& geometry);
entwine::schedule::ArenaDemand demand_of(Variant const& variant, entwine::schedule::Geometry const& geometry);

}  // namespace teams
