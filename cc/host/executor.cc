#include "host/executor.h"

#include <type_traits>
#include <utility>

#include "host/all_gather.h"
#include "host/all_reduce.h"
#include "host/grouped_rows.h"
#include "host/grouped_sums.h"
#include "host/reduce_scatter.h"

namespace entwine::host {
namespace {

template <typename Part>
bool run(Seat const& seat, Crew& crew, uint32_t besides = 0) {
  Arena& own = *(*seat.arenas)[seat.rank];
  own.tile_queue().store(0);
  own.push_queue().store(0);
  own.copy_queue().store(0);
  own.move_queue().store(0);
  own.idle_half().store(0);
  Part part(seat);
  std::atomic<bool> finished{true};
  crew.run(seat.spec->workers + besides, [&](uint32_t worker) {
    if (!part.run(worker)) finished.store(false);
  });
  return finished.load();
}

// Strategy "signal": beside the workers there is one for communication.
template <typename In, typename Out>
bool run_grouped(Seat const& seat, Crew& crew) {
  if constexpr (std::is_same_v<In, Out>)
    return seat.spec->gather() ? run<GroupedRows<In, Out>>(seat, crew, 1) : run<GroupedSums<In, Out>>(seat, crew, 1);
  return false;  // its results are of x's type
}

template <typename In, typename Out>
bool run(Seat const& seat, Crew& crew) {
  if (seat.spec->grouped) return run_grouped<In, Out>(seat, crew);
  uint32_t idle_half = seat.spec->plan.movers != 0 ? 1 : 0;  // of ticket 0's worker
  switch (seat.spec->op) {
    case schedule::Op::kAllGatherMatmul:
      return run<AllGather<In, Out>>(seat, crew, idle_half);
    case schedule::Op::kMatmulReduceScatter:
      return run<ReduceScatter<In, Out>>(seat, crew, idle_half);
    case schedule::Op::kMatmulAllReduce:
      return run<AllReduce<In, Out>>(seat, crew, idle_half);
  }
  return false;
}

template <typename In>
bool run_out(Seat const& seat, Crew& crew) {
  return seat.spec->out == Element::kF32 ? run<In, float>(seat, crew) : run<In, In>(seat, crew);
}

template <typename In>
bool run_scaled(Seat const& seat, Crew& crew) {
  return seat.spec->out == Element::kF32 ? run<In, float>(seat, crew) : run<In, Bf16>(seat, crew);
}

bool run(Seat const& seat, Crew& crew) {
  switch (seat.spec->in) {
    case Element::kBf16:
      return run_out<Bf16>(seat, crew);
    case Element::kF16:
      return run_out<F16>(seat, crew);
    case Element::kF32:
      return run_out<float>(seat, crew);
    case Element::kE4m3:
      return run_scaled<E4m3>(seat, crew);
    case Element::kE5m2:
      return run_scaled<E5m2>(seat, crew);
  }
  return false;
}

}  // namespace

bool execute(Seat const& seat, Crew& crew) {
  if (!tracing()) return run(seat, crew);
  std::vector<Notes> notes(seat.spec->workers + 1);  // at most one is beside the workers
  Seat noted = seat;
  noted.notes = &notes;
  bool finished = run(noted, crew);
  trace_call({*seat.spec, seat.rank, std::move(notes)});
  return finished;
}

}  // namespace entwine::host
