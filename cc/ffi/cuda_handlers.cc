// Stages. Prepare requests the clique; Initialize loads kernels and makes the arena, both before anything spins; Execute
// decodes and launches one kernel, so that it can be recorded into a CUDA graph.
#include "ffi/cuda_handlers.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "ffi/problem.h"
#include "ffi/signal_handlers.h"
#include "kernel/sm90.h"
#include "schedule/few_rows.h"
#include "team/arena.h"
#include "team/clique.h"
#include "team/device_scope.h"
#include "team/stuck.h"
#include "team/trace.h"

namespace entwine {
namespace {

namespace ffi = xla::ffi;
using schedule::Op;
using Clique = ffi::Extension<team::Collectives>;
using team::DeviceScope;

ffi::Error failed(Op op, std::string const& why, ffi::ErrorCode code = ffi::ErrorCode::kFailedPrecondition) {
  return ffi::Error(code, std::string("entwine_jax.") + op_name(op) + ": " + why);
}

// Multiprocessors of the current device; its kernels are loaded at the first call. Negative: a CUDA error.
int ready_device(int device) {
  static std::mutex mutex;
  static std::map<int, int> ready;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = ready.find(device);
  if (found != ready.end()) return found->second;
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = sm90::load_kernels();
  if (error != cudaSuccess) return -static_cast<int>(error);
  return ready[device] = multiprocessors;
}

std::optional<Operands> operands_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return Operands::kBf16;
    case ffi::DataType::F16:
      return Operands::kF16;
    case ffi::DataType::F8E4M3FN:
      return Operands::kE4m3;
    case ffi::DataType::F8E5M2:
      return Operands::kE5m2;
    default:
      return std::nullopt;
  }
}

ffi::ErrorOr<sm90::Call> decode_call(Op op, CallAttributes const& attributes, Buffers const& buffers) {
  ffi::ErrorOr<Problem> decoded = decode_problem(op, schedule::Target::kSm90, attributes, buffers);
  if (!decoded) return ffi::Unexpected<ffi::Error>(decoded.error());
  Problem const& problem = *decoded;
  auto operands = operands_of(problem.in);
  auto same = operands && is_float8(*operands) ? ffi::DataType::BF16 : problem.in;
  if (!operands || (problem.out != same && problem.out != ffi::DataType::F32))
    return ffi::Unexpected<ffi::Error>(
        failed(op,
               "the sm_90 kernels take bfloat16 or float16 x and w and give the same or float32, "
               "or float8 and give bfloat16 or float32: cast, or pass strategy=\"xla\"",
               ffi::ErrorCode::kUnimplemented));
  sm90::Call call{};
  call.op = op;
  call.operands = *operands;
  call.geometry = problem.geometry;
  call.plan = problem.plan;
  call.transposed_w = problem.transpose_w;
  call.transposed_x = problem.transpose_x;
  call.float_out = problem.out == ffi::DataType::F32;
  call.products = problem.products;
  for (uint32_t i = 0; i < schedule::kMaxProducts; ++i) {
    call.x[i] = buffers.x_data(i);
    call.w[i] = buffers.w_data(i);
    call.y[i] = buffers.y_data(i);
    call.bias[i] = buffers.bias_data(i);
    call.activation[i] = problem.activation[i];
  }
  call.scale = buffers.scale_data();
  call.gathering = problem.gathering;
  call.z = buffers.z_data();
  call.gathered = buffers.gathered_data();
  call.timeout_ns = static_cast<uint64_t>(attributes.timeout_ms) * 1'000'000;
  std::string why = sm90::unsupported(call);
  if (!why.empty()) return ffi::Unexpected<ffi::Error>(failed(op, why, ffi::ErrorCode::kUnimplemented));
  return call;
}

schedule::ArenaDemand demand_of(sm90::Call const& call) {
  uint32_t element_bytes = call.op == Op::kAllGatherMatmul ? operand_bytes(call.operands) : call.float_out ? 4 : 2;
  return schedule::call_demand(call.op, call.plan.form, call.geometry, schedule::kSm90Parts, element_bytes, call.gathering,
                               call.plan.movers != 0);
}

ffi::ErrorOr<team::Team*> find_team(Op op, team::CliqueContext clique, CallAttributes const& attributes, int device) {
  auto communicator = team::get_clique(clique, team::make_groups(attributes.groups, attributes.team_size));
  if (!communicator) return ffi::Unexpected<ffi::Error>(communicator.error());
  std::string why;
  team::Team* team = team::Team::of(*communicator, device, &why);
  if (team == nullptr) return ffi::Unexpected<ffi::Error>(failed(op, why));
  if (team->size() != attributes.team_size)
    return ffi::Unexpected<ffi::Error>(failed(op, "XLA's communicator has " + std::to_string(team->size()) +
                                                      " ranks, the mesh axis " + std::to_string(attributes.team_size)));
  return team;
}

template <Op op>
ffi::Error prepare(team::CliqueContext clique, ffi::RemainingArgs, ffi::RemainingRets, CallAttributes attributes) {
  return team::request_clique(clique, team::make_groups(attributes.groups, attributes.team_size));
}

template <Op op>
ffi::Error initialize(team::CliqueContext clique, int32_t device, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                      CallAttributes attributes) {
  auto x = arguments.get<ffi::AnyBuffer>(0), w = arguments.get<ffi::AnyBuffer>(1);
  auto y = results.get<ffi::AnyBuffer>(0);
  if (!x || !w || !y) return failed(op, "XLA gave Initialize no buffers", ffi::ErrorCode::kInternal);
  Buffers buffers = all_buffers(op, *x, *w, **y, attributes, arguments, results, 2, 1);
  auto call = decode_call(op, attributes, buffers);
  if (!call) return call.error();
  DeviceScope scope(device);
  int multiprocessors = ready_device(device);
  if (multiprocessors < 0)
    return failed(op, cudaGetErrorString(static_cast<cudaError_t>(-multiprocessors)), ffi::ErrorCode::kInternal);
  if (team::stuck_report() == nullptr) return failed(op, "no pinned host memory", ffi::ErrorCode::kResourceExhausted);
  auto team = find_team(op, clique, attributes, device);
  if (!team) return team.error();
  std::string why;
  if ((*team)->find_or_make(demand_of(*call), {op, call->timeout_ns}, &why) == nullptr)
    return failed(op, why, ffi::ErrorCode::kResourceExhausted);
  return ffi::Error::Success();
}

template <Op op>
ffi::Error execute(team::CliqueContext clique, cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets also, CallAttributes attributes) {
  auto call = decode_call(op, attributes, all_buffers(op, x, w, *y, attributes, more, also));
  if (!call) return call.error();
  auto team = find_team(op, clique, attributes, device);
  if (!team) return team.error();
  team::Arena const* arena = (*team)->find(demand_of(*call));
  if (arena == nullptr) return failed(op, "no arena was made in Initialize", ffi::ErrorCode::kInternal);
  call->arena = arena->layout;
  call->arenas = arena->base;
  call->rank = static_cast<uint32_t>((*team)->rank());
  call->stuck = team::stuck_report();
  call->multiprocessors = static_cast<uint32_t>(ready_device(device));
  if (team::tracing()) {
    sm90::TraceShape notes = sm90::trace_shape(*call);
    if (notes.events() != 0) {
      team::TracedLaunch traced{};
      traced.strategy = call->plan.movers != 0 ? "resident" : "fused";
      traced.op = op;
      traced.geometry = call->geometry;
      traced.rank = call->rank;
      traced.out_bytes = call->float_out ? 4 : 2;
      traced.unit_bytes = notes.unit_bytes;
      traced.device = device;
      traced.ctas = notes.ctas;
      traced.capacity = notes.capacity;
      call->trace = team::trace_launch(std::move(traced));
    }
  }
  cudaError_t error = sm90::launch(*call, stream);
  if (error != cudaSuccess) return failed(op, std::string("launch: ") + cudaGetErrorString(error), ffi::ErrorCode::kInternal);
  return ffi::Error::Success();
}

template <Op op>
nanobind::dict stages() {
  static auto prepare_handler =
      ffi::Ffi::BindPrepare().Ctx<Clique>().RemainingArgs().RemainingRets().Attrs<CallAttributes>().To(prepare<op>);
  static auto initialize_handler = ffi::Ffi::BindInitialize()
                                       .Ctx<Clique>()
                                       .Ctx<ffi::DeviceOrdinal>()
                                       .RemainingArgs()
                                       .RemainingRets()
                                       .Attrs<CallAttributes>()
                                       .To(initialize<op>);
  static auto execute_handler = ffi::Ffi::Bind()
                                    .Ctx<Clique>()
                                    .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                    .Ctx<ffi::DeviceOrdinal>()
                                    .Arg<ffi::AnyBuffer>()
                                    .Arg<ffi::AnyBuffer>()
                                    .RemainingArgs()
                                    .Ret<ffi::AnyBuffer>()
                                    .RemainingRets()
                                    .Attrs<CallAttributes>()
                                    .To(execute<op>, {ffi::Traits::kCmdBufferCompatible});
  auto capsule = [](XLA_FFI_Handler* handler) { return nanobind::capsule(reinterpret_cast<void*>(handler)); };
  nanobind::dict stages;
  stages["prepare"] = capsule(+[](XLA_FFI_CallFrame* frame) { return prepare_handler->Call(frame); });
  stages["initialize"] = capsule(+[](XLA_FFI_CallFrame* frame) { return initialize_handler->Call(frame); });
  stages["execute"] = capsule(+[](XLA_FFI_CallFrame* frame) { return execute_handler->Call(frame); });
  return stages;
}

}  // namespace

nanobind::dict cuda_registrations() {
  nanobind::dict targets = signal_registrations();
  targets["entwine_all_gather_matmul"] = stages<Op::kAllGatherMatmul>();
  targets["entwine_matmul_reduce_scatter"] = stages<Op::kMatmulReduceScatter>();
  targets["entwine_matmul_all_reduce"] = stages<Op::kMatmulAllReduce>();
  return targets;
}

std::string hopper(std::vector<int> const& ordinals) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return "no CUDA device is visible";
  }
  for (int device : ordinals) {
    if (device < 0 || device >= count) return "there is no local CUDA device " + std::to_string(device);
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major != 9 || minor != 0)
      return "device " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
             std::to_string(minor) + ", the kernels need 9.0 (Hopper)";
  }
  return "";
}

std::string peer_access(std::vector<int> const& ordinals) {
  std::string why = hopper(ordinals);
  if (!why.empty()) return why;
  for (int device : ordinals)
    for (int peer : ordinals) {
      int reachable = 1;
      if (peer != device) cudaDeviceCanAccessPeer(&reachable, device, peer);
      if (!reachable) return "device " + std::to_string(device) + " can't access the memory of device " + std::to_string(peer);
    }
  return "";
}

}  // namespace entwine
