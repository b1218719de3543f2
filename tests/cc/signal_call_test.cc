// Decoding of a call of strategy "signal": what it makes of a good one, and that each bad one is named.
#include "ffi/signal_call.h"

#include <cstdint>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace entwine {
namespace {

namespace ffi = xla::ffi;
using schedule::Op;

XLA_FFI_Buffer buffer(std::vector<int64_t>& dims, ffi::DataType type) {
  XLA_FFI_Buffer b{};
  b.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  b.dtype = static_cast<XLA_FFI_DataType>(type);
  b.rank = static_cast<int64_t>(dims.size());
  b.dims = dims.data();
  return b;
}

struct Call {
  Op op;
  std::vector<int64_t> x, w = {7, 5}, y, scratch = {1, 1, 1 << 20}, z, gathered;
  ffi::DataType type = ffi::F32, out = ffi::F32, of_scratch = ffi::U8;
  bool has_scratch = true;
  std::vector<int64_t> groups = {0, 1, 2, 3};
  SignalAttributes attributes{};

  explicit Call(Op op) : op(op) {
    x = {2, op == Op::kAllGatherMatmul ? 10 : 40, 7};
    y = {2, op == Op::kMatmulReduceScatter ? 10 : 40, 5};
    attributes.team_size = 4;
    attributes.tile_m = attributes.tile_n = attributes.raster = attributes.pushers = attributes.copiers = attributes.workers =
        attributes.products = attributes.comm_sms = 1;
  }
  ffi::ErrorOr<SignalProblem> decode(schedule::Target target = schedule::Target::kHost) {
    attributes.groups = {groups.data(), groups.size()};
    XLA_FFI_Buffer xb = buffer(x, type), wb = buffer(w, type), yb = buffer(y, out), sb = buffer(scratch, of_scratch);
    XLA_FFI_Buffer zb = buffer(z, type), gb = buffer(gathered, type);
    Buffers buffers{ffi::AnyBuffer(&xb), ffi::AnyBuffer(&wb), ffi::AnyBuffer(&yb), {}, {}, {}, {}, {}};
    if (!z.empty()) buffers.z = ffi::AnyBuffer(&zb);
    if (!gathered.empty()) buffers.gathered = ffi::AnyBuffer(&gb);
    return decode_signal(op, target, attributes, buffers, has_scratch ? Buffers::Optional(ffi::AnyBuffer(&sb)) : std::nullopt);
  }
};

void good_calls_decode() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
    Call call(op);
    call.attributes.comm_sms = 16;
    call.attributes.group_waves = 3;
    call.attributes.far = 1;
    auto found = call.decode();
    CHECK_THAT(found.has_value(), (found ? "" : found.error().message()));
    if (!found) continue;
    CHECK(found->plan.comm_sms == 16 && found->plan.group_waves == 3 && found->plan.far);
    // Scratch may be as small as it must be, and no smaller; less where the gathered x is a result.
    schedule::Geometry g = schedule::grouped(op, found->problem.geometry);
    call.scratch[2] = static_cast<int64_t>(schedule::scratch_bytes(op, g, 4, false));
    CHECK(call.decode().has_value());
    --call.scratch[2];
    CHECK(!call.decode().has_value());
    if (op != Op::kAllGatherMatmul) continue;
    call.gathered = {2, 40, 7};
    call.scratch[2] = schedule::kScratchHead;
    CHECK(call.decode().has_value());
  }
}

void copy_engines_are_for_gpus_that_see_each_other() {
  Call call(Op::kMatmulAllReduce);
  call.attributes.comm_sms = 0;
  auto found = call.decode(schedule::Target::kSm90);
  CHECK(found.has_value() && found->plan.engines());
  CHECK(!call.decode(schedule::Target::kHost).has_value());
  call.attributes.far = 1;
  CHECK(!call.decode(schedule::Target::kSm90).has_value());
}

void bad_calls_are_named() {
  std::vector<std::pair<std::function<void(Call&)>, std::string>> faults = {
      {[](Call& c) { c.has_scratch = false; }, "second result must be scratch"},
      {[](Call& c) { c.scratch = {1, 1, 16}; }, "second result must be scratch"},
      {[](Call& c) { c.scratch = {8, 16}; }, "second result must be scratch"},
      {[](Call& c) { c.of_scratch = ffi::S8; }, "second result must be scratch"},
      {[](Call& c) { c.type = ffi::BF16; }, "a result of x's dtype"},
      {[](Call& c) { c.attributes.comm_sms = 0; }, "(comm_sms 0, group_waves 0, far 0) is out of range"},
      {[](Call& c) { c.attributes.group_waves = int64_t{1} << 20; }, "is out of range"},
      {[](Call& c) { c.attributes.group_waves = -1; }, "is out of range"},
      {[](Call& c) { c.attributes.far = 2; }, "is out of range"},
      {[](Call& c) { c.attributes.few_rows = 1; }, "one product of tiles"},
      {[](Call& c) { c.attributes.products = 2; }, "lacks an operand"},
      {[](Call& c) { c.w = {6, 5}; }, "contraction size 7 but w has 6"},
  };
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (auto const& [spoil, words] : faults) {
      Call call(op);
      spoil(call);
      auto found = call.decode();
      CHECK_THAT(!found.has_value(), op_name(op) << ": not refused: " << words);
      if (found) continue;
      std::string message = found.error().message();
      CHECK_THAT(message.find(std::string("entwine_jax.") + op_name(op)) == 0, message);
      CHECK_THAT(message.find(words) != std::string::npos, message << " lacks " << words);
    }
  Call beside(Op::kMatmulReduceScatter);
  beside.z = {3, 6, 11};
  beside.gathered = {3, 24, 11};
  auto found = beside.decode();
  CHECK(!found.has_value() && found.error().message().find("gathers nothing beside") != std::string::npos);
}

// Any numbers: an error, or groups that cover the call and scratch for them.
void any_numbers_decode_or_are_refused() {
  std::mt19937_64 random(1);
  auto odd = [&]() -> int64_t {
    static constexpr int64_t kEdges[] = {
        INT64_MIN,        -(int64_t{1} << 31), -1,       0, 1, 2, 3, (int64_t{1} << 20) - 1, int64_t{1} << 20, INT32_MAX,
        int64_t{1} << 31, int64_t{1} << 32,    INT64_MAX};
    uint64_t kind = random() % 8;
    return kind == 0  ? static_cast<int64_t>(random())
           : kind < 3 ? kEdges[random() % std::size(kEdges)]
                      : int64_t(random() % 70);
  };
  uint32_t good = 0;
  for (uint32_t i = 0; i < 20000; ++i) {
    Op op = static_cast<Op>(random() % 3);
    Call call(op);
    for (int64_t SignalAttributes::* field :
         {&SignalAttributes::comm_sms, &SignalAttributes::group_waves, &SignalAttributes::far})
      if (random() % 3 == 0) call.attributes.*field = odd();
    for (int64_t CallAttributes::* field : {&CallAttributes::tile_m, &CallAttributes::tile_n, &CallAttributes::raster})
      if (random() % 3 == 0) call.attributes.*field = odd();
    int64_t rows = random() % 50 == 0 ? 1 << 24 : 1 + int64_t(random() % 300),
            n = random() % 50 == 0 ? 1 << 22 : 1 + int64_t(random() % 300);
    call.w[1] = call.y[2] = n;
    call.x[1] = op == Op::kAllGatherMatmul ? rows : 4 * rows;
    call.y[1] = op == Op::kMatmulReduceScatter ? rows : 4 * rows;
    call.scratch[2] = INT64_MAX;
    for (schedule::Target target : {schedule::Target::kHost, schedule::Target::kSm90}) {
      auto found = call.decode(target);
      if (!found) continue;
      schedule::Geometry g = schedule::grouped(op, found->problem.geometry);
      if (target == schedule::Target::kSm90 && !schedule::is_signal_tile(g.tile_m, g.tile_n)) continue;  // refused next
      schedule::Groups groups =
          schedule::make_groups(op, target, found->problem.geometry, found->plan, schedule::kSm90Multiprocessors, 4).groups;
      CHECK_EQ(groups.ends[groups.count - 1], schedule::cells(op, g));
      ++good;
    }
  }
  CHECK_THAT(good > 1000, good);
}

}  // namespace
}  // namespace entwine

int main() {
  return check::run({{"good calls decode", entwine::good_calls_decode},
                     {"copy engines are for GPUs that see each other", entwine::copy_engines_are_for_gpus_that_see_each_other},
                     {"bad calls are named", entwine::bad_calls_are_named},
                     {"any numbers decode or are refused", entwine::any_numbers_decode_or_are_refused}});
}
