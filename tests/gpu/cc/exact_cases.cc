#include "exact_cases.h"

#include <algorithm>

#include "progress.h"
#include "schedule/few_rows.h"

namespace teams {

using namespace entwine;
using schedule::Transport;

namespace {

constexpr uint32_t kBatches[] = {1, 3}, kRows[] = {1, 100, 129, 300}, kColumns[] = {8, 136, 520}, kDepths[] = {8, 72, 520};

}  // namespace

std::vector<Geometry> exact_shapes(uint32_t ranks) {
  std::vector<Geometry> shapes;
  for (uint32_t batch : kBatches)
    for (uint32_t m_shard : kRows)
      for (uint32_t n : kColumns)
        for (uint32_t k : kDepths) shapes.push_back(geometry_of(ranks, batch, m_shard, n, k));
  // For operands of 8 bits, whose rows must be a multiple of 16 long.
  for (uint32_t m_shard : kRows)
    for (uint32_t n : kColumns)
      for (uint32_t k : {16u, 144u, 528u}) shapes.push_back(geometry_of(ranks, m_shard == 129 ? 3 : 1, m_shard, n, k));
  // Deep enough for few rows to be cut into up to eight slices, the last of which is short.
  for (uint32_t m_shard : {2u, 13u, 31u, 50u})
    for (uint32_t n : {136u, 1160u})
      for (uint32_t k : {1032u, 4168u}) shapes.push_back(geometry_of(ranks, m_shard == 2 ? 3 : 1, m_shard, n, k));
  for (uint32_t m_shard : {2u, 13u, 31u, 50u})
    for (uint32_t n : {136u, 1160u})
      shapes.push_back(geometry_of(ranks, m_shard == 2 ? 3 : 1, m_shard, n, n == 136 ? 1040 : 4176));
  // So many columns that a slice of few rows is all of k, and too deep to keep x in shared memory; several tiles a cluster. Or
  // so shallow that w of the next tiles has come long before a tile is finished.
  for (uint32_t k : {4168u, 4176u, 8u, 16u}) shapes.push_back(geometry_of(ranks, 1, 2, 8584, k));
  return shapes;
}

std::vector<Geometry> chosen_shapes(uint32_t ranks) {
  // Several tiles with tails, of 16 bits and of 8; and few rows, one shape for each number that there are kernels for.
  if (each_once())
    return {geometry_of(ranks, 1, 300, 520, 72),          geometry_of(ranks, 1, 16 / ranks, 136, 1032),
            geometry_of(ranks, 1, 64 / ranks, 136, 1032), geometry_of(ranks, 1, 128 / ranks, 136, 1032),
            geometry_of(ranks, 1, 300, 520, 144),         geometry_of(ranks, 1, 16 / ranks, 136, 1040),
            geometry_of(ranks, 1, 64 / ranks, 136, 1040), geometry_of(ranks, 1, 128 / ranks, 136, 1040)};
  std::vector<Geometry> shapes = exact_shapes(ranks), some;
  uint32_t count = setting("TEAMS_SHAPES", 0);
  if (count == 0 || count >= shapes.size()) return shapes;
  for (uint32_t i = 0; i < count; ++i) some.push_back(shapes[i * shapes.size() / count]);
  return some;
}

std::vector<Variant> exact_variants() {
  std::vector<Variant> variants;
  for (bool transposed_w : {false, true})
    for (bool float_out : {false, true})
      for (Op op : kOps)
        variants.push_back({op, Transport::kPull, transposed_w, float_out, 0, 1, schedule::kSm90Tiles[0], true});
  for (bool transposed_w : {false, true})
    for (bool float_out : {false, true})
      for (schedule::TileShape tile : schedule::kSm90Tiles) {
        for (uint32_t pushers : kPushers)
          variants.push_back({Op::kAllGatherMatmul, Transport::kPull, transposed_w, float_out, kLeads[2], pushers, tile});
        for (Op op : {Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
          // How w lies is nothing to what an all-reduce adds: each type with one way will do.
          if (op == Op::kMatmulAllReduce && transposed_w != float_out) continue;
          variants.push_back({op, Transport::kPull, transposed_w, float_out, kLeads[0], 1, tile});
          variants.push_back({op, Transport::kPull, transposed_w, float_out, kLeads[3], 1, tile});
          for (uint32_t pushers : kPushers)
            variants.push_back({op, Transport::kPush, transposed_w, float_out, kLeads[pushers % 4], pushers, tile});
        }
        // What is gathered doesn't care how w lies and what y is, but staging and signals lie after those of y.
        if (transposed_w != float_out) continue;
        for (uint32_t pushers : kPushers) {
          variants.push_back(
              {Op::kAllGatherMatmul, Transport::kPull, transposed_w, float_out, kLeads[2], pushers, tile, false, true});
          for (Transport transport : {Transport::kPull, Transport::kPush})
            variants.push_back(
                {Op::kMatmulReduceScatter, transport, transposed_w, float_out, kLeads[2], pushers, tile, false, true});
        }
      }
  // Bias and relu don't care how w lies, but it is another kernel.
  for (bool float_out : {false, true})
    for (Op op : kOps) {
      for (bool transposed_w : {false, true})
        variants.push_back({op, Transport::kPull, transposed_w, float_out, 0, 1, schedule::kSm90Tiles[0], true, false, true});
      for (schedule::TileShape tile : schedule::kSm90Tiles)
        for (Transport transport : {Transport::kPull, Transport::kPush}) {
          bool gathers = op != Op::kMatmulAllReduce && transport == Transport::kPush;
          variants.push_back(
              {op, transport, transport == Transport::kPull, float_out, kLeads[2], kPushers[1], tile, false, gathers, true});
        }
    }
  // Strategy "resident": the same kernels, with few movers and with more than a rank of a large team has clusters.
  for (bool float_out : {false, true})
    for (Op op : kOps)
      for (schedule::TileShape tile : schedule::kSm90Tiles)
        for (uint32_t movers : {float_out ? 1u : 2u, 9u}) {
          Variant moved{op, Transport::kPush, float_out, float_out, kLeads[movers % 4], kPushers[movers != 1], tile};
          moved.movers = movers;
          moved.gathers = movers != 9 && op != Op::kMatmulAllReduce;
          moved.finishes = movers == 9;
          if (movers == 2) moved.operands = Operands::kF16;
          variants.push_back(moved);
          if (movers != 9 || !float_out) continue;
          moved.operands = op == Op::kMatmulReduceScatter ? Operands::kE5m2 : Operands::kE4m3;
          variants.push_back(moved);
        }
  // What doesn't depend on the type of operands has been looked at: each kernel once, and what is gathered.
  for (bool transposed_w : {false, true})
    for (bool float_out : {false, true})
      for (Op op : kOps) {
        Transport transport = transposed_w ? Transport::kPull : Transport::kPush;
        Variant few{op, transport, transposed_w, float_out, kLeads[2], kPushers[1], schedule::kSm90Tiles[0], true};
        few.operands = Operands::kF16;
        variants.push_back(few);
        if (transposed_w)
          for (Operands operands : {Operands::kE4m3, Operands::kE5m2}) {
            Variant narrow = few;
            narrow.operands = operands;
            narrow.finishes = operands == Operands::kE4m3;
            variants.push_back(narrow);
          }
        for (schedule::TileShape tile : schedule::kSm90Tiles) {
          Variant tiles = few;
          tiles.few_rows = false;
          tiles.tile = tile;
          tiles.gathers = float_out && op != Op::kMatmulAllReduce;
          tiles.finishes = !float_out;
          variants.push_back(tiles);
          if (!transposed_w) continue;
          for (Operands operands : {Operands::kE4m3, Operands::kE5m2}) {
            tiles.operands = operands;
            tiles.transport = operands == Operands::kE4m3 ? Transport::kPull : Transport::kPush;
            variants.push_back(tiles);
          }
        }
      }
  auto lacks = [](Variant const& v) { return !schedule::is_sm90_tile(v.tile, v.float_out ? 4 : 2); };
  variants.erase(std::remove_if(variants.begin(), variants.end(), lacks), variants.end());
  return variants;
}

bool meant_for(Variant const& v, Geometry const& g) { return (g.k % 16 == 0) == is_float8(v.operands); }

bool Kernels::first(Variant const& v, Geometry const& g) {
  bool few = form_of(v, g) == schedule::Form::kFewRows;
  bool roles = !few && v.operands == Operands::kBf16 && !v.transposed_w && !v.float_out && v.tile.m * v.tile.n == 256 * 256;
  return seen_
      .insert({v.op, v.operands, v.transposed_w, v.float_out, few ? schedule::few_rows(v.op, g).room : v.tile.m,
               few ? 0 : v.tile.n,
               roles ? static_cast<uint32_t>(v.transport) + 2 * v.gathers + 4 * v.finishes + 8 * v.movers : 0})
      .second;
}

uint32_t family_of(Variant const& v) {
  if (v.movers != 0) return 16 + static_cast<uint32_t>(v.op);
  if (v.operands != Operands::kBf16) return is_float8(v.operands) ? 15 : 14;
  if (v.finishes) return 11 + static_cast<uint32_t>(v.op);
  if (v.few_rows) return 5 + static_cast<uint32_t>(v.op);
  if (v.op == Op::kAllGatherMatmul) return v.gathers ? 8 : 0;
  if (v.gathers) return 9 + (v.transport == Transport::kPush);
  return (v.op == Op::kMatmulReduceScatter ? 1 : 3) + (v.transport == Transport::kPush);
}

}  // namespace teams
