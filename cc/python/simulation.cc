// The simulated machine: cc/simulate.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "python/arguments.h"
#include "schedule/plan.h"
#include "simulate/groups.h"
#include "simulate/predict.h"

namespace entwine {
namespace {

namespace nb = nanobind;
using namespace nb::literals;
using namespace schedule;

// The measured machine with some numbers replaced.
simulate::Machine machine_of(nb::dict const& numbers) {
  simulate::Machine machine;
  size_t known = 0;
  simulate::for_each_number(machine, [&](char const* name, double& number) {
    if (!numbers.contains(name)) return;
    number = nb::cast<double>(numbers[name]);
    ++known;
    // Rates that are next to nothing would make the simulation next to endless.
    double least = std::string(name).find("_per_us") != std::string::npos || std::string(name) == "unit_bytes" ? 1e3 : 0;
    if (!(number >= least && number <= 1e12))
      throw std::invalid_argument(std::string(name) + " must be from " + std::to_string(uint32_t(least)) + " to 1e12");
  });
  if (known != numbers.size()) throw std::invalid_argument("the numbers of a machine have other names");
  return machine;
}

nb::dict machine() {
  nb::dict d;
  simulate::Machine machine;
  simulate::for_each_number(machine, [&](char const* name, double number) { d[name] = number; });
  return d;
}

nb::dict times_of(simulate::Times const& times) {
  nb::dict d;
  d["us"] = times.us;
  d["link_us"] = times.link_us;
  d["multiply_us"] = times.multiply_us;
  d["wait_rows_us"] = times.wait_rows_us;
  d["wait_sums_us"] = times.wait_sums_us;
  d["wait_buffers_us"] = times.wait_buffers_us;
  return d;
}

// "spans" are the bytes of simulate::Span.
nb::dict dict_of(simulate::Spans const& spans) {
  nb::dict d;
  d["spans"] = nb::bytes(reinterpret_cast<char const*>(spans.all.data()), spans.all.size() * sizeof(simulate::Span));
  d["link_bytes"] = spans.link_bytes;
  d["bin_us"] = spans.bin_us;
  return d;
}

// `plan` as make_plan gives it. With the spans if they are `wanted`.
std::pair<nb::dict, nb::dict> simulate_fused(std::string const& op, nb::dict const& plan, uint32_t ranks, uint32_t batch,
                                             uint32_t m_shard, uint32_t n, uint32_t k, uint32_t missing, uint32_t out_bytes,
                                             uint32_t in_bytes, nb::dict const& machine, bool wanted) {
  auto number = [&](char const* name) { return nb::cast<uint32_t>(plan[name]); };
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  Plan p{number("tile_m"),
         number("tile_n"),
         number("raster"),
         number("lead"),
         static_cast<Transport>(number("transport")),
         number("pushers"),
         nb::cast<bool>(plan["few_rows"]) ? Form::kFewRows : Form::kTiles,
         number("copiers"),
         number("movers")};
  if (!is_sm90_tile({p.tile_m, p.tile_n}, out_bytes) || p.raster < 1) throw std::invalid_argument("the plan is not of sm_90");
  simulate::Spans spans;
  simulate::Times times = simulate::fused(op_of(op), g, p, out_bytes, in_bytes, machine_of(machine), wanted ? &spans : nullptr);
  return {times_of(times), dict_of(spans)};
}

nb::dict simulate_xla(std::string const& op, uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k,
                      uint32_t missing, uint32_t out_bytes, uint32_t in_bytes, bool gated, nb::dict const& machine) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  return times_of(simulate::xla(op_of(op), g, out_bytes, in_bytes, machine_of(machine), gated));
}

std::pair<nb::dict, nb::dict> simulate_signal(std::string const& op, uint32_t ranks, uint32_t batch, uint32_t m_shard,
                                              uint32_t n, uint32_t k, uint32_t missing, uint32_t tile_m, uint32_t tile_n,
                                              uint32_t raster, uint32_t comm_sms, uint32_t group_waves, bool far,
                                              uint32_t element_bytes, nb::dict const& machine, bool wanted) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, tile_m, tile_n, missing);
  if (!is_signal_tile(tile_m, tile_n) || (comm_sms == 0 && far) || comm_sms >= kSm90Multiprocessors || raster < 1)
    throw std::invalid_argument("the plan is not of strategy \"signal\" on sm_90");
  simulate::Spans spans;
  simulate::Times times = simulate::signal(op_of(op), g, {comm_sms, group_waves, far}, element_bytes, machine_of(machine),
                                           raster, wanted ? &spans : nullptr);
  return {times_of(times), dict_of(spans)};
}

}  // namespace

void define_simulation(nb::module_& m) {
  m.def("machine", &machine, "The numbers of the machine that is simulated: see simulate/machine.h.");
  m.def(
      "check_machine", [](nb::dict const& numbers) { machine_of(numbers); }, "numbers"_a,
      "ValueError if these can't be numbers of a machine.");
  m.def("simulate_fused", &simulate_fused, "op"_a, "plan"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a,
        "missing"_a = 0, "out_bytes"_a, "in_bytes"_a = 2, "machine"_a, "spans"_a = false,
        "Microseconds of a fused call on sm_90 and what they go into, by going through its schedule; `machine`: other numbers. "
        "And what its clusters do when, if that is wanted.");
  m.def("simulate_signal", &simulate_signal, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a,
        "missing"_a = 0, "tile_m"_a, "tile_n"_a, "raster"_a, "comm_sms"_a, "group_waves"_a, "far"_a, "element_bytes"_a,
        "machine"_a, "spans"_a = false, "The same of a call of strategy \"signal\", by its groups.");
  m.def("simulate_xla", &simulate_xla, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "out_bytes"_a, "in_bytes"_a = 2, "gated"_a = false, "machine"_a, "The same of XLA's collective and GEMM.");
}

}  // namespace entwine
