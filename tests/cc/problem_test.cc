// Decoding of a call: what it makes of good buffers, and that each bad one is named with both values.
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "ffi/problem.h"

namespace entwine {
namespace {

namespace ffi = xla::ffi;
using schedule::Op;

// A call of which one thing at a time is spoilt.
struct Call {
  Op op;
  std::vector<int64_t> x, w, y, groups = {0, 1, 2, 3};
  ffi::DataType x_type = ffi::F32, w_type = ffi::F32, y_type = ffi::F32;
  CallAttributes attributes{};

  explicit Call(Op op) : op(op) {
    x = {2, op == Op::kAllGatherMatmul ? 10 : 40, 7};
    w = {7, 5};
    y = {2, op == Op::kMatmulReduceScatter ? 10 : 40, 5};
    attributes.team_size = 4;
    attributes.tile_m = attributes.tile_n = attributes.raster = attributes.pushers = attributes.workers = 1;
  }

  ffi::ErrorOr<Problem> decode(schedule::Target target = schedule::Target::kHost) {
    attributes.groups = {groups.data(), groups.size()};
    XLA_FFI_Buffer xb = buffer(x, x_type), wb = buffer(w, w_type), yb = buffer(y, y_type);
    return decode_problem(op, target, attributes, ffi::AnyBuffer(&xb), ffi::AnyBuffer(&wb), ffi::AnyBuffer(&yb));
  }

 private:
  static XLA_FFI_Buffer buffer(std::vector<int64_t>& dims, ffi::DataType type) {
    XLA_FFI_Buffer b{};
    b.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    b.dtype = static_cast<XLA_FFI_DataType>(type);
    b.rank = static_cast<int64_t>(dims.size());
    b.dims = dims.data();
    return b;
  }
};

void good_calls_decode() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (bool transpose : {false, true}) {
      Call call(op);
      call.attributes.transpose_w = transpose;
      if (transpose) std::swap(call.w[0], call.w[1]);
      call.attributes.lead = 9;
      call.attributes.transport = 1;
      auto problem = call.decode();
      CHECK_THAT(problem.has_value(), problem.error().message());
      if (!problem.has_value()) continue;
      schedule::Geometry const& g = problem->geometry;
      CHECK(g.ranks == 4 && g.n == 5 && g.k == 7);
      if (op == Op::kMatmulAllReduce)  // rows of all batches together
        CHECK(g.batch == 1 && g.m_shard == 20 && g.missing == 0);
      else
        CHECK(g.batch == 2 && g.m_shard == 10 && g.missing == 0);
      CHECK(problem->plan.lead == 9 && problem->plan.transport == schedule::Transport::kPush);
      CHECK(problem->transpose_w == transpose && problem->in == ffi::F32 && problem->out == ffi::F32);
    }
}

// 2 x 41 rows for 4 ranks: 21 each, the last one 2 less; on a GPU 64 and 18, and none for the last two.
void an_all_reduce_takes_any_rows() {
  Call call(Op::kMatmulAllReduce);
  call.x[1] = call.y[1] = 41;
  auto host = call.decode(), gpu = call.decode(schedule::Target::kSm90);
  CHECK(host.has_value() && gpu.has_value());
  if (!host.has_value() || !gpu.has_value()) return;
  CHECK(host->geometry.m_shard == 21 && host->geometry.missing == 2 && host->geometry.all_rows() == 82);
  CHECK(gpu->geometry.m_shard == 64 && gpu->geometry.missing == 174 && gpu->geometry.all_rows() == 82);
}

void bad_calls_are_named() {
  struct Fault {
    std::function<void(Call&)> spoil;
    std::vector<std::string> words;
  };
  Fault const faults[] = {
      {[](Call& c) { c.x.pop_back(); }, {"ranks 3, 2 and 3", "2, 2 and 3"}},
      {[](Call& c) { c.attributes.team_size = 9; }, {"2 to 8", "9"}},
      {[](Call& c) { c.attributes.team_size = 1; }, {"2 to 8", "1"}},
      {[](Call& c) { c.groups.pop_back(); }, {"groups", "3", "4"}},
      {[](Call& c) { c.w[0] = 8; }, {"x", "contraction", "7", "w", "8"}},
      {[](Call& c) { ++(c.op == Op::kAllGatherMatmul ? c.y : c.x)[1]; }, {"41", "rows"}},
      {[](Call& c) { c.y[2] = 6; }, {"result", "6", "5"}},
      {[](Call& c) { c.w_type = ffi::BF16; }, {"dtype"}},
      {[](Call& c) { c.x[2] = c.w[0] = 0; }, {"size 0"}},
      {[](Call& c) { c.x[2] = c.w[0] = int64_t{1} << 31; }, {"size 2147483648"}},
      {[](Call& c) { c.attributes.tile_m = 0; }, {"plan", "tile_m 0"}},
      {[](Call& c) { c.attributes.raster = 0; }, {"plan", "raster 0"}},
      {[](Call& c) { c.attributes.lead = -1; }, {"plan", "lead -1"}},
      {[](Call& c) { c.attributes.transport = 2; }, {"plan", "transport 2"}},
      {[](Call& c) { c.attributes.pushers = 0; }, {"plan", "pushers 0"}},
      {[](Call& c) { c.attributes.few_rows = 2; }, {"plan", "few_rows 2"}},
      {[](Call& c) {
         c.x[0] = c.y[0] = int64_t{1} << 30;
         if (c.op == Op::kMatmulAllReduce) c.x[1] = c.y[1] = 1;
       },
       {"more tiles"}},
  };
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (Fault const& fault : faults) {
      Call call(op);
      fault.spoil(call);
      auto problem = call.decode();
      CHECK_THAT(problem.has_error(), fault.words.front());
      if (!problem.has_error()) continue;
      std::string message = problem.error().message();
      CHECK_THAT(message.find(std::string("entwine_jax.") + op_name(op)) == 0, message);
      for (std::string const& word : fault.words)
        CHECK_THAT(message.find(word) != std::string::npos, message << " lacks " << word);
    }
}

}  // namespace
}  // namespace entwine

int main() {
  using namespace entwine;
  return check::run({{"good calls decode", good_calls_decode},
                     {"an all-reduce takes any rows", an_all_reduce_takes_any_rows},
                     {"bad calls are named", bad_calls_are_named}});
}
