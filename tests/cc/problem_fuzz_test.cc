// Decoding of random calls: any attributes, dimensions and dtypes give a Problem or an error, and a Problem is safe: what is
// planned from it (arenas, signals, orders, tiles) is computed here once more in 128 bits, and small ones are run.
//
// Inputs are calls that would decode, of which up to three things are replaced by odd ones. The same ones in every run;
// ENTWINE_FUZZ_INPUTS sets how many, ENTWINE_FUZZ_SEED where they begin.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "fuzz_safety.h"
#include "host/team.h"

namespace entwine::fuzz {
namespace {

std::optional<host::Element> element(ffi::DataType type) {
  if (type == ffi::BF16) return host::Element::kBf16;
  if (type == ffi::F16) return host::Element::kF16;
  if (type == ffi::F32) return host::Element::kF32;
  if (type == ffi::F8E4M3FN) return host::Element::kE4m3;
  if (type == ffi::F8E5M2) return host::Element::kE5m2;
  return std::nullopt;
}

// Runs a small problem on the host executor with buffers of exactly the sizes that were decoded; sanitizers look on. False: it
// isn't one for the executor.
bool ran(Input const& in, Problem const& problem, uint64_t number) {
  auto from = element(problem.in), to = element(problem.out), second = element(in.w_type);
  auto same = from && host::is_float8(*from) ? host::Element::kBf16 : from;
  if (in.target != Target::kHost || !from || !to || (to != same && to != host::Element::kF32)) return false;
  auto bytes_of = [](std::vector<int64_t> const& dims, ffi::DataType type) {
    double bytes = double(ffi::ByteWidth(type));
    for (int64_t d : dims) bytes *= double(d);
    return bytes;
  };
  bool gather = problem.op == schedule::Op::kAllGatherMatmul;
  uint32_t count = problem.products.count;
  // As if all products were as large as they are together.
  double work = double(problem.geometry.n) * double(problem.geometry.k) * double(ffi::ByteWidth(in.x_type)) * double(in.x[0]) *
                double(in.x[problem.transpose_x ? 2 : 1]) * double(in.attributes.team_size);
  double beside = problem.gathering.any() ? double(problem.gathering.chunk_bytes()) : 0;
  if (work > 2e5 || beside > 2e4 || in.attributes.workers < 1 || in.attributes.workers > 4) return false;

  static auto* teams = new std::unique_ptr<host::Team>[schedule::kMaxRanks + 1];  // their threads may outlive main()
  uint32_t ranks = problem.geometry.ranks;
  if (!teams[ranks]) teams[ranks] = std::make_unique<host::Team>(ranks, uint32_t(0xfffffff0u));
  host::CallSpec spec{op_name(problem.op), problem.op,      problem.geometry, problem.plan, problem.transpose_w, *from, *to,
                      problem.gathering,   problem.products};
  spec.transpose_x = problem.transpose_x;
  std::copy_n(problem.activation, schedule::kMaxProducts, spec.activation);
  spec.workers = uint32_t(in.attributes.workers);
  spec.timeout = host::Timeout(60000);
  // On the heap, where a byte too far is found; ones are exact in every type.
  auto make = [&](double bytes, host::Element e) {
    uint32_t bits = e == host::Element::kBf16   ? 0x3f80
                    : e == host::Element::kF16  ? 0x3c00
                    : e == host::Element::kE4m3 ? 0x38
                    : e == host::Element::kE5m2 ? 0x3c
                                                : 0x3f800000;
    std::vector<std::byte> data(static_cast<size_t>(bytes));
    for (size_t i = 0, n = host::element_bytes(e); i < data.size(); i += n) std::memcpy(&data[i], &bits, n);
    return data;
  };
  std::vector<float> bias[schedule::kMaxProducts], scale;
  if (in.has_bias) bias[0].assign(size_t(in.bias[0]), 1);
  if (in.has_scale) scale.assign(gather ? count : 1, 1);
  std::vector<std::byte> x = make(bytes_of(in.x, in.x_type), *from), w = make(bytes_of(in.w, in.w_type), *second), z;
  if (in.has_z) z.assign(static_cast<size_t>(bytes_of(in.z, in.z_type)), std::byte{7});
  // Of the products after the first, as the first has them.
  std::vector<std::byte> xs[schedule::kMaxProducts], ws[schedule::kMaxProducts];
  for (uint32_t i = 1; i < count; ++i) {
    Input::More const& m = in.more[i - 1];
    if (!gather) xs[i] = make(bytes_of(m.x, m.x_type), *from);
    ws[i] = make(bytes_of(m.w, m.w_type), *second);
    if (gather && m.has_bias) bias[i].assign(size_t(m.bias[0]), 1);
  }
  bool each = gather && !problem.products.gated;  // has a result
  uint32_t results = each ? count : 1;
  std::vector<std::vector<std::byte>> y(ranks * results), whole(ranks);
  std::mutex mutex;
  std::condition_variable changed;
  uint32_t left = ranks;
  std::string error;
  for (uint32_t r = 0; r < ranks; ++r) {
    y[r].assign(static_cast<size_t>(bytes_of(in.y, in.y_type)), std::byte{0xff});
    host::Operands operands{x.data(), w.data(), y[r].data()};
    if (in.has_z) operands.z = z.data();
    if (in.has_bias) operands.bias = bias[0].data();
    if (in.has_scale) operands.scale = scale.data();
    for (uint32_t i = 1; i < count; ++i) {
      std::vector<std::byte>* its = each ? &y[i * ranks + r] : nullptr;
      if (its != nullptr) its->assign(static_cast<size_t>(bytes_of(in.more[i - 1].y, in.y_type)), std::byte{0xff});
      operands.more[i - 1] = {gather ? nullptr : xs[i].data(), ws[i].data(), its != nullptr ? its->data() : nullptr,
                              bias[i].empty() ? nullptr : bias[i].data()};
    }
    if (in.has_whole) whole[r].assign(static_cast<size_t>(bytes_of(in.whole, in.whole_type)), std::byte{0xff});
    if (in.has_whole) operands.gathered = whole[r].data();
    teams[ranks]->submit(r, {number, int64_t(number), 0}, spec, operands, [&](std::string const* why) {
      std::lock_guard<std::mutex> lock(mutex);
      if (why != nullptr) error = *why;
      if (--left == 0) changed.notify_all();
    });
  }
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return left == 0; });
  CHECK_THAT(error.empty(), error);
  // k ones a rank, rounded as sums of ones are: equal in all of a product's results, so the first element tells what all must
  // be.
  size_t size = ffi::ByteWidth(in.y_type);
  for (uint32_t of = 0; of < y.size(); ++of)
    for (size_t i = 0; i < y[of].size(); i += size)
      if (std::memcmp(&y[of][i], y[of / ranks * ranks].data(), size) != 0) {
        check::fail(__FILE__, __LINE__, "input " + std::to_string(number) + ": results of ones differ");
        return true;
      }
  for (auto const& each : whole)
    if (in.has_z)
      CHECK(std::all_of(each.begin(), each.end(), [](std::byte b) { return b == std::byte{7}; }));
    else if (!each.empty())
      CHECK(std::memcmp(each.data(), x.data(), x.size()) == 0);
  return true;
}

uint64_t setting(char const* name, uint64_t otherwise) {
  char const* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

void any_input_is_a_problem_or_an_error() {
  uint64_t first = setting("ENTWINE_FUZZ_SEED", 0), inputs = setting("ENTWINE_FUZZ_INPUTS", 100'000);
  uint64_t decoded = 0, refused = 0, run = 0, several = 0, several_run = 0;
  for (uint64_t number = first; number < first + inputs; ++number) {
    Random random{std::mt19937_64(number)};
    Input in = good(random);
    for (uint64_t faults = random.below(4); faults != 0; --faults) spoil(in, random);
    auto problem = decode_problem(in.op, in.target, in.attributes, in.buffers());
    if (problem.has_error()) {
      ++refused;
      std::string message = problem.error().message();
      CHECK_THAT(message.find(std::string("entwine_jax.") + op_name(in.op)) == 0, "input " << number << ": " << message);
      continue;
    }
    ++decoded;
    std::string why = Safety(in, *problem).find(random);
    CHECK_THAT(why.empty(), "input " << number << " decodes, but: " << why);
    several += problem->products.count > 1;
    if (!why.empty() || !ran(in, *problem, number)) continue;
    ++run;
    several_run += problem->products.count > 1;
  }
  check::count("fuzz_inputs", inputs);
  check::count("fuzz_decoded", decoded);
  check::count("fuzz_refused", refused);
  check::count("fuzz_run", run);
  check::count("fuzz_several_decoded", several);
  check::count("fuzz_several_run", several_run);
  CHECK_THAT(inputs < 1000 || (decoded > inputs / 10 && refused > inputs / 10 && run > inputs / 200),
             decoded << " of " << inputs << " decoded, " << run << " run");
  CHECK_THAT(inputs < 1000 || (several > inputs / 20 && several_run > inputs / 1000),
             several << " of several products decoded, " << several_run << " run");
}

}  // namespace
}  // namespace entwine::fuzz

int main() { return check::run({{"any input is a problem or an error", entwine::fuzz::any_input_is_a_problem_or_an_error}}); }
