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
  std::vector<int64_t> x, w, y, bias, z, gathered, groups = {0, 1, 2, 3};  // bias, z and gathered: empty for none
  ffi::DataType x_type = ffi::F32, w_type = ffi::F32, y_type = ffi::F32, z_type = ffi::BF16, gathered_type = ffi::BF16;
  ffi::DataType bias_type = ffi::F32, scale_type = ffi::F32;
  bool scaled = false;  // has a scale, of this shape
  std::vector<int64_t> scale;
  CallAttributes attributes{};
  // Of the products after the first; of `biases` an empty one is none.
  std::vector<std::vector<int64_t>> xs, ws, ys, biases;
  ffi::DataType more_type = ffi::F32;

  explicit Call(Op op) : op(op) {
    x = {2, op == Op::kAllGatherMatmul ? 10 : 40, 7};
    w = {7, 5};
    y = {2, op == Op::kMatmulReduceScatter ? 10 : 40, 5};
    attributes.team_size = 4;
    attributes.tile_m = attributes.tile_n = attributes.raster = attributes.pushers = attributes.copiers = attributes.workers =
        attributes.products = 1;
  }

  // Three products: a w of 3 and one of 4 columns more, or so much of a contraction.
  Call& several() {
    attributes.products = 3;
    for (int64_t size : {3, 4}) {
      bool gather = op == Op::kAllGatherMatmul;
      ws.push_back(gather ? std::vector<int64_t>{7, size} : std::vector<int64_t>{size, 5});
      (gather ? ys : xs).push_back({2, 40, size});
      if (gather) biases.emplace_back();
    }
    return *this;
  }

  Call& gated() {
    attributes.products = 2;
    attributes.gated = 1;
    ws = {{7, 5}};
    return *this;
  }

  ffi::ErrorOr<Problem> decode(schedule::Target target = schedule::Target::kHost) {
    attributes.groups = {groups.data(), groups.size()};
    XLA_FFI_Buffer xb = buffer(x, x_type), wb = buffer(w, w_type), yb = buffer(y, y_type);
    XLA_FFI_Buffer zb = buffer(z, z_type), gb = buffer(gathered, gathered_type);
    XLA_FFI_Buffer bb = buffer(bias, bias_type), sb = buffer(scale, scale_type);
    Buffers buffers{ffi::AnyBuffer(&xb), ffi::AnyBuffer(&wb), ffi::AnyBuffer(&yb), {}, {}, {}, {}, {}};
    if (!bias.empty()) buffers.bias = ffi::AnyBuffer(&bb);
    if (scaled) buffers.scale = ffi::AnyBuffer(&sb);
    if (!z.empty()) buffers.z = ffi::AnyBuffer(&zb);
    if (!gathered.empty()) buffers.gathered = ffi::AnyBuffer(&gb);
    XLA_FFI_Buffer more[4][schedule::kMaxProducts];
    size_t row = 0;
    auto add = [&](std::vector<std::vector<int64_t>>& all, ffi::DataType type, Buffers::Optional Buffers::More::* which) {
      for (size_t i = 0; i < all.size(); ++i) {
        more[row][i] = buffer(all[i], type);
        if (!all[i].empty()) buffers.more[i].*which = ffi::AnyBuffer(&more[row][i]);
      }
      ++row;
    };
    add(xs, x_type, &Buffers::More::x);
    add(ws, more_type, &Buffers::More::w);
    add(ys, y_type, &Buffers::More::y);
    add(biases, bias_type, &Buffers::More::bias);
    return decode_problem(op, target, attributes, buffers);
  }

  Call& float8(ffi::DataType type) {
    x_type = type;
    w_type = ffi::F8E4M3FN;
    y_type = ffi::BF16;
    attributes.scaled = scaled = true;
    return *this;
  }

  // With what it gathers: x, or z beside.
  Call& gathering() {
    if (op == Op::kAllGatherMatmul) {
      gathered = {2, 40, 7};
      gathered_type = ffi::F32;
    } else {
      z = {3, 6, 11};
      gathered = {3, 24, 11};
    }
    return *this;
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
      call.attributes.activation = 2 * transpose;
      call.attributes.biased = transpose;
      if (transpose) call.bias = {5};
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
      CHECK(problem->activation[0] == (transpose ? schedule::Activation::kGelu : schedule::Activation::kNone));
      CHECK(problem->plan.lead == 9 && problem->plan.transport == schedule::Transport::kPush);
      CHECK(problem->transpose_w == transpose && problem->in == ffi::F32 && problem->out == ffi::F32);
    }
}

// x as (batch, k, rows); of an all-reduce the rows of one batch.
void transposed_x_decodes() {
  for (Op op : {Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (bool several : {false, true}) {
      Call call(op);
      if (several) call.several();
      call.attributes.transpose_x = 1;
      std::swap(call.x[1], call.x[2]);
      for (std::vector<int64_t>& x : call.xs) std::swap(x[1], x[2]);
      bool replicate = op == Op::kMatmulAllReduce;
      if (replicate) {
        CHECK(call.decode().has_error() && call.decode().error().message().find("of one batch, not of 2") != std::string::npos);
        call.x[0] = call.y[0] = 1;
        for (std::vector<int64_t>& x : call.xs) x[0] = 1;
      }
      auto problem = call.decode();
      CHECK_THAT(problem.has_value(), problem.error().message());
      if (!problem.has_value()) continue;
      schedule::Geometry const& g = problem->geometry;
      CHECK(problem->transpose_x && g.m_shard == 10 && g.k == (several ? 14 : 7) && g.batch == (replicate ? 1 : 2));
    }
}

// Numbers that are larger than the call has a use for are as good as those that it has.
void plans_are_cut_to_size() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
    Call call(op);
    auto& a = call.attributes;
    a.tile_m = a.tile_n = a.raster = a.lead = a.pushers = a.copiers = (int64_t{1} << 31) - 1;
    auto problem = call.decode();
    CHECK_THAT(problem.has_value(), problem.error().message());
    if (!problem.has_value()) continue;
    schedule::Geometry const& g = problem->geometry;
    CHECK(g.tile_m == 32 && g.tile_n == 32 && problem->plan.tile_m == 32 && problem->plan.tile_n == 32);
    CHECK(problem->plan.raster == g.chunk_rows());
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

void several_products_decode() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
    bool gather = op == Op::kAllGatherMatmul;
    Call call = Call(op).several();
    call.attributes.tile_n = 4;
    call.attributes.biased = 1;
    call.bias = {5};
    call.attributes.activation = 1;
    if (gather) {
      call.attributes.activation |= 4 << 16;
      call.attributes.biased |= 2;
      call.biases[0] = {3};
    }
    auto problem = call.decode();
    CHECK_THAT(problem.has_value(), problem.error().message());
    if (!problem.has_value()) continue;
    // Columns take whole tiles: 8, 4 and 4.
    CHECK_EQ(problem->geometry.n, gather ? 16u : 5u);
    CHECK_EQ(problem->geometry.k, gather ? 7u : 14u);
    schedule::Products const& products = problem->products;
    CHECK(products.count == 3 && products.sizes[0] == (gather ? 5 : 7) && products.sizes[1] == 3 && products.sizes[2] == 4);
    CHECK(problem->activation[0] == schedule::Activation::kRelu && problem->activation[1] == schedule::Activation::kNone);
    CHECK(problem->activation[2] == (gather ? schedule::Activation::kSilu : schedule::Activation::kNone));
  }
}

void gatherings_decode() {
  for (bool asked : {false, true}) {
    Call call(Op::kAllGatherMatmul);
    call.attributes.tile_m = 4;
    if (asked) call.gathering();
    auto problem = call.decode();
    CHECK(problem.has_value());
    schedule::Gathering const& x = problem->gathering;
    CHECK(x.batch == 2 && x.rows == 10 && x.row_bytes == 28 && x.block_rows == 4);
  }
  Call call(Op::kMatmulReduceScatter);
  CHECK(call.decode().has_value() && !call.decode()->gathering.any());
  call.attributes.tile_m = 4;
  auto problem = call.gathering().decode();
  CHECK(problem.has_value());
  schedule::Gathering const& z = problem->gathering;
  CHECK(z.batch == 3 && z.rows == 6 && z.row_bytes == 22 && z.block_rows == 4);
}

constexpr Op kOps[] = {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce};

struct Fault {
  std::function<void(Call&)> spoil;
  std::vector<std::string> words;
};

void check_fault(Call call, Fault const& fault) {
  fault.spoil(call);
  auto problem = call.decode();
  CHECK_THAT(problem.has_error(), fault.words.front());
  if (!problem.has_error()) return;
  std::string message = problem.error().message();
  CHECK_THAT(message.find(std::string("entwine_jax.") + op_name(call.op)) == 0, message);
  for (std::string const& word : fault.words) CHECK_THAT(message.find(word) != std::string::npos, message << " lacks " << word);
}

// One y of 5 columns, in tiles that have 2 of each product's.
void gated_products_decode() {
  Call call = Call(Op::kAllGatherMatmul).gated();
  call.attributes.tile_n = 3;  // made even
  call.attributes.biased = 2;
  call.biases = {{5}};
  call.attributes.activation = 4;
  auto problem = call.decode();
  CHECK_THAT(problem.has_value(), problem.error().message());
  if (!problem.has_value()) return;
  CHECK(problem->geometry.n == 10 && problem->geometry.tile_n == 4 && problem->geometry.cols() == 3);
  CHECK(problem->products.gated && problem->products.count == 2 && problem->products.results() == 1);
  CHECK(problem->activation[0] == schedule::Activation::kSilu && problem->activation[1] == schedule::Activation::kNone);
  Fault const faults[] = {
      {[](Call& c) { c.attributes.gated = 2; }, {"can be gated", "2 of 2"}},
      {[](Call& c) { c.attributes.products = 1; }, {"can be gated", "1 of 1"}},
      {[](Call& c) { c.ws[0] = {7, 6}; }, {"gated w have 5 and 6 columns"}},
      {[](Call& c) { c.ws[0] = {6, 5}; }, {"w of product 1 has", "size 6"}},
      {[](Call& c) { c.ys = {{2, 40, 5}}; }, {"product 1 lacks"}},
      {[](Call& c) { c.attributes.activation = 1 << 8; }, {"no activation 256"}},
      {[](Call& c) { c.attributes.biased = 2, c.biases = {{4}}; }, {"bias must be float32", "(5)"}},
      {[](Call& c) { c.float8(ffi::F8E4M3FN), c.more_type = ffi::F8E4M3FN; }, {"no float8"}},
  };
  for (Fault const& fault : faults) check_fault(Call(Op::kAllGatherMatmul).gated(), fault);
  check_fault(Call(Op::kMatmulReduceScatter).several(), {[](Call& c) { c.attributes.gated = 1; }, {"can be gated"}});
}

void bad_gatherings_are_named() {
  Fault const both[] = {
      {[](Call& c) { ++c.gathered[1]; }, {"gathered", "must be"}},
      {[](Call& c) { ++c.gathered[2]; }, {"gathered", "must be"}},
      {[](Call& c) { c.gathered.pop_back(); }, {"gathered", "must be"}},
      {[](Call& c) { c.gathered_type = ffi::F16; }, {"gathered", "dtype"}},
  };
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter})
    for (Fault const& fault : both) check_fault(Call(op).gathering(), fault);
  check_fault(Call(Op::kAllGatherMatmul).gathering(), {[](Call& c) { c.z = {3, 6, 11}; }, {"gathers x"}});
  check_fault(Call(Op::kMatmulAllReduce).gathering(), {[](Call&) {}, {"gathers nothing"}});
  Fault const beside[] = {
      {[](Call& c) { c.z.clear(); }, {"z and its gathered whole"}},
      {[](Call& c) { c.gathered.clear(); }, {"z and its gathered whole"}},
      {[](Call& c) { c.z.pop_back(); }, {"z must have rank 3", "2"}},
      {[](Call& c) { c.z[1] = c.gathered[1] = 0; }, {"z has a dimension of size 0"}},
      {[](Call& c) { c.z_type = c.gathered_type = ffi::S4; }, {"S4", "whole bytes"}},
      {[](Call& c) { c.z[0] = c.gathered[0] = c.z[2] = c.gathered[2] = 1 << 30; }, {"too large to be gathered"}},
      {[](Call& c) { c.z[0] = c.gathered[0] = 1 << 24; }, {"row blocks", "16777216"}},
  };
  for (Fault const& fault : beside) check_fault(Call(Op::kMatmulReduceScatter).gathering(), fault);
}

void bad_calls_are_named() {
  Fault const faults[] = {
      {[](Call& c) { c.x.pop_back(); }, {"ranks 3, 2 and 3", "2, 2 and 3"}},
      {[](Call& c) { c.attributes.team_size = 9; }, {"2 to 8", "9"}},
      {[](Call& c) { c.attributes.team_size = 1; }, {"2 to 8", "1"}},
      {[](Call& c) { c.groups.pop_back(); }, {"groups", "3", "4"}},
      {[](Call& c) { c.groups.clear(); }, {"groups", "0", "4"}},
      {[](Call& c) { c.attributes.timeout_ms = int64_t{1} << 31; }, {"timeout", "2147483648 ms"}},
      {[](Call& c) { c.attributes.stall_us = -1; }, {"stall", "-1 us"}},
      {[](Call& c) { c.w[1] = c.y[2] = c.x[2] = c.w[0] = (int64_t{1} << 31) - 1; }, {"larger than any memory"}},
      {[](Call& c) { c.w[0] = 8; }, {"x", "contraction", "7", "w", "8"}},
      {[](Call& c) { ++(c.op == Op::kAllGatherMatmul ? c.y : c.x)[1]; }, {"41", "rows"}},
      {[](Call& c) { c.y[2] = 6; }, {"result", "6", "5"}},
      {[](Call& c) { c.w_type = ffi::BF16; }, {"dtype"}},
      {[](Call& c) { c.x[2] = c.w[0] = 0; }, {"size 0"}},
      {[](Call& c) { c.x[2] = c.w[0] = int64_t{1} << 31; }, {"size 2147483648"}},
      {[](Call& c) { c.attributes.biased = 1; }, {"biased is 1", "no bias"}},
      {[](Call& c) { c.bias = {5}; }, {"biased is 0", "a bias"}},
      {[](Call& c) { c.bias = {4}, c.attributes.biased = 1; }, {"bias must be float32", "(5)"}},
      {[](Call& c) { c.bias = {5, 1}, c.attributes.biased = 1; }, {"bias must be float32", "(5)"}},
      {[](Call& c) { c.bias = {5}, c.attributes.biased = 1, c.bias_type = ffi::BF16; }, {"bias must be float32"}},
      {[](Call& c) { c.attributes.activation = 5; }, {"no activation 5"}},
      {[](Call& c) { c.attributes.activation = -1; }, {"no activation -1"}},
      {[](Call& c) { c.attributes.tile_m = 0; }, {"plan", "tile_m 0"}},
      {[](Call& c) { c.attributes.raster = 0; }, {"plan", "raster 0"}},
      {[](Call& c) { c.attributes.lead = -1; }, {"plan", "lead -1"}},
      {[](Call& c) { c.attributes.transport = 2; }, {"plan", "transport 2"}},
      {[](Call& c) { c.attributes.pushers = 0; }, {"plan", "pushers 0"}},
      {[](Call& c) { c.attributes.few_rows = 2; }, {"plan", "few_rows 2"}},
      {[](Call& c) { c.attributes.copiers = 0; }, {"plan", "copiers 0"}},
      {[](Call& c) { c.attributes.movers = -1; }, {"plan", "movers -1"}},
      {[](Call& c) { c.attributes.movers = schedule::kMaxMovers + 1; }, {"plan", "movers 4097"}},
      {[](Call& c) { c.attributes.pushers = int64_t{1} << 32; }, {"plan", "pushers 4294967296"}},
      {[](Call& c) {
         c.x[0] = c.y[0] = int64_t{1} << 30;
         if (c.op == Op::kMatmulAllReduce) c.x[1] = c.y[1] = 1;
       },
       {"more tiles"}},
  };
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (Fault const& fault : faults) check_fault(Call(op), fault);
}

void bad_products_are_named() {
  Fault const faults[] = {
      {[](Call& c) { c.attributes.products = 0; }, {"products must be 1 to 4", "0"}},
      {[](Call& c) { c.attributes.products = 5; }, {"products must be 1 to 4", "5"}},
      {[](Call& c) { c.attributes.products = 4; }, {"products is 4", "product 3 lacks"}},
      {[](Call& c) { c.ws[1].pop_back(); }, {"w of product 2", "matrix"}},
      {[](Call& c) { c.more_type = ffi::BF16; }, {"w of product 1", "dtype"}},
      {[](Call& c) { ++c.ws[0][c.op == Op::kAllGatherMatmul ? 0 : 1]; }, {"w of product 1 has", "size"}},
      {[](Call& c) { ++c.ws[0][c.op == Op::kAllGatherMatmul ? 1 : 0]; }, {"of product 1 must be (2, 40, 4)"}},
      {[](Call& c) { c.attributes.biased = 8; }, {"biased is 8", "results"}},
      {[](Call& c) { c.attributes.activation = 1 << 24; }, {"no activation 16777216"}},
  };
  for (Op op : kOps)
    for (Fault const& fault : faults) check_fault(Call(op).several(), fault);
  Fault const gathering[] = {
      {[](Call& c) { c.attributes.biased = 2; }, {"biased is 2", "no bias"}},
      {[](Call& c) { c.biases[1] = {4}; }, {"biased is 0", "a bias"}},
      {[](Call& c) { c.biases[1] = {5}, c.attributes.biased = 4; }, {"bias must be float32", "(4)"}},
      {[](Call& c) { c.attributes.activation = 5 << 8; }, {"no activation 5"}},
      {[](Call& c) { c.ys[0][1] = 39; }, {"the result of product 1 must be (2, 40, 3)"}},
  };
  for (Fault const& fault : gathering) check_fault(Call(Op::kAllGatherMatmul).several(), fault);
  check_fault(Call(Op::kMatmulReduceScatter).several(), {[](Call& c) { c.xs[1][0] = 3; }, {"x of product 2 must be"}});
}

void bad_transposed_x_is_named() {
  check_fault(Call(Op::kAllGatherMatmul), {[](Call& c) { c.attributes.transpose_x = 1; }, {"transpose_x is 1", "gathered"}});
  auto turn = [](Call& c) {
    c.attributes.transpose_x = 1;
    std::swap(c.x[1], c.x[2]);
  };
  check_fault(Call(Op::kMatmulReduceScatter), {[&](Call& c) { turn(c), c.attributes.few_rows = 1; }, {"few_rows"}});
  check_fault(Call(Op::kMatmulReduceScatter), {[&](Call& c) { turn(c), c.float8(ffi::F8E4M3FN); }, {"float8 x", "contiguous"}});
  check_fault(Call(Op::kMatmulReduceScatter), {[&](Call& c) { turn(c), ++c.x[1]; }, {"contraction size 8", "7"}});
  check_fault(Call(Op::kMatmulReduceScatter), {[&](Call& c) { turn(c), ++c.x[2]; }, {"41 rows"}});

  check_fault(Call(Op::kMatmulReduceScatter).several(), {turn, {"x of product 1 must be (2, 3, 40)"}});
}

void float8_has_a_scale() {
  for (Op op : kOps)
    for (ffi::DataType type : {ffi::F8E4M3FN, ffi::F8E5M2}) {
      auto problem = Call(op).float8(type).decode();
      CHECK(problem.has_value() && problem->in == type && problem->out == ffi::BF16);
    }
  Fault const faults[] = {
      {[](Call& c) { c.w_type = ffi::F8E5M2; }, {"w float8_e4m3fn"}},
      {[](Call& c) { c.x_type = ffi::BF16; }, {"one dtype"}},
      {[](Call& c) { c.scaled = false; }, {"scale", "attribute scaled is 1", "no scale"}},
      {[](Call& c) { c.attributes.scaled = 0; }, {"scale", "attribute scaled is 0", "a scale"}},
      {[](Call& c) { c.attributes.scaled = 2; }, {"attribute scaled is 2"}},
      {[](Call& c) { c.scale = {2}; }, {"scale", "one float32", "1 in all"}},
      {[](Call& c) { c.scale_type = ffi::BF16; }, {"scale", "one float32"}},
  };
  // Of several products of an all-gather each has one, a sum has one for all.
  for (Op op : kOps) {
    bool gather = op == Op::kAllGatherMatmul;
    Call call(op);
    call.several().float8(ffi::F8E4M3FN);
    call.more_type = ffi::F8E4M3FN;
    if (gather) call.scale = {call.attributes.products};
    CHECK(call.decode().has_value());
    for (std::vector<int64_t> wrong : {std::vector<int64_t>{}, {2}, {1, 3}, {4}})
      if (gather || !wrong.empty()) check_fault(call, {[&](Call& c) { c.scale = wrong; }, {"scale", "for each result"}});
  }
  for (Op op : kOps)
    for (Fault const& fault : faults) check_fault(Call(op).float8(ffi::F8E4M3FN), fault);
  check_fault(Call(Op::kAllGatherMatmul), {[](Call& c) { c.attributes.scaled = c.scaled = true; }, {"others have none"}});
}

}  // namespace
}  // namespace entwine

int main() {
  using namespace entwine;
  return check::run({{"good calls decode", good_calls_decode},
                     {"transposed x decodes", transposed_x_decodes},
                     {"bad transposed x is named", bad_transposed_x_is_named},
                     {"plans are cut to size", plans_are_cut_to_size},
                     {"an all-reduce takes any rows", an_all_reduce_takes_any_rows},
                     {"several products decode", several_products_decode},
                     {"gated products decode", gated_products_decode},
                     {"bad calls are named", bad_calls_are_named},
                     {"bad products are named", bad_products_are_named},
                     {"float8 has a scale", float8_has_a_scale},
                     {"gatherings decode", gatherings_decode},
                     {"bad gatherings are named", bad_gatherings_are_named}});
}
