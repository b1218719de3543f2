// Which calls the exact test makes.
#pragma once

#include <set>
#include <tuple>
#include <vector>

#include "calls.h"

namespace teams {

std::vector<Geometry> exact_shapes(uint32_t ranks);
// So many of them as the environment's TEAMS_SHAPES says, all by default; or those that have each kernel run once.
std::vector<Geometry> chosen_shapes(uint32_t ranks);
// TEAMS_EACH: each kernel once, for compute-sanitizer, which is slow; bfloat16's large tiles in each of their roles.
inline bool each_once() { return setting("TEAMS_EACH", 0) != 0; }
class Kernels {
 public:
  // Whether this call is the first of its kernel.
  bool first(Variant const& v, Geometry const& g);

 private:
  std::set<std::tuple<Op, entwine::Operands, bool, bool, uint32_t, uint32_t, uint32_t>> seen_;
};
std::vector<Variant> exact_variants();
// Rows of x are a multiple of 16 bytes. Shapes that 8-bit operands can have are for these alone.
bool meant_for(Variant const& v, Geometry const& g);

// What the test reports together.
inline constexpr char const* kFamilies[] = {"all_gather_matmul",
                                            "matmul_reduce_scatter pull",
                                            "matmul_reduce_scatter push",
                                            "matmul_all_reduce pull",
                                            "matmul_all_reduce push",
                                            "all_gather_matmul few rows",
                                            "matmul_reduce_scatter few rows",
                                            "matmul_all_reduce few rows",
                                            "all_gather_matmul with the gathered x",
                                            "matmul_reduce_scatter pull gathering beside",
                                            "matmul_reduce_scatter push gathering beside",
                                            "all_gather_matmul with bias and relu",
                                            "matmul_reduce_scatter with bias and relu",
                                            "matmul_all_reduce with bias and relu",
                                            "float16",
                                            "float8",
                                            "all_gather_matmul resident",
                                            "matmul_reduce_scatter resident",
                                            "matmul_all_reduce resident"};
uint32_t family_of(Variant const& v);

}  // namespace teams
