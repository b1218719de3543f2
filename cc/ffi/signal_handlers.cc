// Strategy "signal" on GPUs: what XLA calls. Decoding, checks, and what a call needs before it is enqueued (signal_streams.cc).
#include "ffi/signal_handlers.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <string>

#include "ffi/signal_call.h"
#include "ffi/signal_streams.h"
#include "team/arena.h"
#include "team/clique.h"
#include "team/device_scope.h"
#include "team/stuck.h"

namespace entwine {
namespace {

namespace ffi = xla::ffi;
using schedule::Op;
using Clique = ffi::Extension<team::Collectives>;

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
  if (error == cudaSuccess) error = sm90::load_signal_kernels();
  if (error != cudaSuccess) return -static_cast<int>(error);
  return ready[device] = multiprocessors;
}

ffi::ErrorOr<SignalStreams> decode_call(Op op, SignalAttributes const& attributes, Buffers const& buffers,
                                        Buffers::Optional const& scratch, int multiprocessors) {
  auto decoded = decode_signal(op, schedule::Target::kSm90, attributes, buffers, scratch);
  if (!decoded) return ffi::Unexpected<ffi::Error>(decoded.error());
  Problem const& problem = decoded->problem;
  if (problem.in != ffi::DataType::BF16 && problem.in != ffi::DataType::F16)
    return ffi::Unexpected<ffi::Error>(
        failed(op, "the sm_90 kernels take bfloat16 or float16 x and w: cast, or pass strategy=\"xla\"",
               ffi::ErrorCode::kUnimplemented));
  SignalStreams call{};
  sm90::SignalCall& k = call.kernel;
  k.op = op;
  k.geometry = schedule::grouped(op, problem.geometry);
  k.raster = problem.plan.raster;
  k.operands = problem.in == ffi::DataType::F16 ? Operands::kF16 : Operands::kBf16;
  k.transposed_w = problem.transpose_w;
  k.transposed_x = problem.transpose_x;
  k.x = buffers.x_data(0);
  k.w = buffers.w_data(0);
  k.y = buffers.y_data(0);
  k.bias = buffers.bias_data(0);
  k.activation = problem.activation[0];
  k.scratch = decoded->scratch;
  k.whole = buffers.gathered ? buffers.gathered_data() : k.tiles();
  std::string why = sm90::unsupported(k);
  if (!why.empty()) return ffi::Unexpected<ffi::Error>(failed(op, why, ffi::ErrorCode::kUnimplemented));
  call.multiprocessors = static_cast<uint32_t>(multiprocessors);
  // The same on every rank, whatever its GPU is.
  k.groups = schedule::make_groups(op, schedule::Target::kSm90, problem.geometry, decoded->plan, schedule::kSm90Multiprocessors,
                                   kSignalElementBytes)
                 .groups;
  call.all_clusters = call.multiprocessors / 2;
  uint32_t left = schedule::smaller(decoded->plan.comm_sms, call.multiprocessors - 2);  // to NCCL
  call.clusters = (call.multiprocessors - left) / 2;
  call.type = k.operands == Operands::kF16 ? team::Beside::kF16 : team::Beside::kBf16;
  k.ranks = problem.geometry.ranks;
  call.geometry = problem.geometry;
  call.engines = decoded->plan.engines();
  call.demand = schedule::landing_demand(op, k.geometry, k.ranks, kSignalElementBytes);
  call.timeout_ns = static_cast<uint64_t>(attributes.timeout_ms) * 1'000'000;
  return call;
}

ffi::ErrorOr<team::Beside*> find_beside(Op op, team::CliqueContext clique, SignalAttributes const& attributes, int device) {
  auto communicator =
      team::get_clique(clique, team::make_groups(attributes.groups, attributes.team_size), team::kSignalCommunicationId);
  if (!communicator) return ffi::Unexpected<ffi::Error>(communicator.error());
  std::string why;
  team::Beside* beside = team::Beside::of(*communicator, device, &why);
  if (beside == nullptr) return ffi::Unexpected<ffi::Error>(failed(op, why));
  if (beside->size() != attributes.team_size)
    return ffi::Unexpected<ffi::Error>(failed(op, "XLA's communicator has " + std::to_string(beside->size()) +
                                                      " ranks, the mesh axis " + std::to_string(attributes.team_size)));
  return beside;
}

template <Op op>
ffi::Error prepare(team::CliqueContext clique, ffi::RemainingArgs, ffi::RemainingRets, SignalAttributes attributes) {
  return team::request_clique(clique, team::make_groups(attributes.groups, attributes.team_size), team::kSignalCommunicationId);
}

Buffers::Optional second_result(ffi::RemainingRets results, size_t index) {
  auto scratch = results.get<ffi::AnyBuffer>(index);
  return scratch ? Buffers::Optional(**scratch) : std::nullopt;
}

template <Op op>
ffi::Error initialize(team::CliqueContext clique, int32_t device, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                      SignalAttributes attributes) {
  auto x = arguments.get<ffi::AnyBuffer>(0), w = arguments.get<ffi::AnyBuffer>(1);
  auto y = results.get<ffi::AnyBuffer>(0);
  if (!x || !w || !y) return failed(op, "XLA gave Initialize no buffers", ffi::ErrorCode::kInternal);
  team::DeviceScope scope(device);
  int multiprocessors = ready_device(device);
  if (multiprocessors < 0)
    return failed(op, cudaGetErrorString(static_cast<cudaError_t>(-multiprocessors)), ffi::ErrorCode::kInternal);
  Buffers buffers = all_buffers(op, *x, *w, **y, attributes, arguments, results, 2, 2);
  auto call = decode_call(op, attributes, buffers, second_result(results, 1), multiprocessors);
  if (!call) return call.error();
  auto beside = find_beside(op, clique, attributes, device);
  if (!beside) return beside.error();
  std::string why;
  if (!call->engines) {
    why = (*beside)->warm_up(call->patience(), call->counts(), call->type);
    return why.empty() ? ffi::Error::Success() : failed(op, why, ffi::ErrorCode::kInternal);
  }
  if (team::stuck_report() == nullptr) return failed(op, "no pinned host memory", ffi::ErrorCode::kResourceExhausted);
  team::Team* team = team::Team::of((*beside)->communicator(), device, &why);
  if (team == nullptr || team->find_or_make(call->demand, call->patience(), &why) == nullptr)
    return failed(op, why, ffi::ErrorCode::kResourceExhausted);
  return ffi::Error::Success();
}

template <Op op>
ffi::Error execute(team::CliqueContext clique, cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets also,
                   SignalAttributes attributes) {
  team::DeviceScope scope(device);
  Buffers buffers = all_buffers(op, x, w, *y, attributes, more, also, 0, 1);
  auto call = decode_call(op, attributes, buffers, second_result(also, 0), ready_device(device));
  if (!call) return call.error();
  auto found = find_beside(op, clique, attributes, device);
  if (!found) return found.error();
  team::Beside& beside = **found;
  sm90::SignalCall& k = call->kernel;
  k.rank = static_cast<uint32_t>(beside.rank());
  call->device = device;

  team::Arena const* arena = nullptr;
  if (call->engines) {
    std::string why;
    team::Team* team = team::Team::of(beside.communicator(), device, &why);
    if (team == nullptr) return failed(op, why);
    arena = team->find(call->demand);
    if (arena == nullptr) return failed(op, "no arena was made in Initialize", ffi::ErrorCode::kInternal);
  }

  std::string why = call->enqueue(beside, arena, stream, buffers.gathered ? buffers.gathered->untyped_data() : nullptr);
  return why.empty() ? ffi::Error::Success() : failed(op, why, ffi::ErrorCode::kInternal);
}

template <Op op>
nanobind::dict stages() {
  static auto prepare_handler =
      ffi::Ffi::BindPrepare().Ctx<Clique>().RemainingArgs().RemainingRets().Attrs<SignalAttributes>().To(prepare<op>);
  static auto initialize_handler = ffi::Ffi::BindInitialize()
                                       .Ctx<Clique>()
                                       .Ctx<ffi::DeviceOrdinal>()
                                       .RemainingArgs()
                                       .RemainingRets()
                                       .Attrs<SignalAttributes>()
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
                                    .Attrs<SignalAttributes>()
                                    .To(execute<op>);
  auto capsule = [](XLA_FFI_Handler* handler) { return nanobind::capsule(reinterpret_cast<void*>(handler)); };
  nanobind::dict stages;
  stages["prepare"] = capsule(+[](XLA_FFI_CallFrame* frame) { return prepare_handler->Call(frame); });
  stages["initialize"] = capsule(+[](XLA_FFI_CallFrame* frame) { return initialize_handler->Call(frame); });
  stages["execute"] = capsule(+[](XLA_FFI_CallFrame* frame) { return execute_handler->Call(frame); });
  return stages;
}

}  // namespace

nanobind::dict signal_registrations() {
  nanobind::dict targets;
  targets["entwine_signal_all_gather_matmul"] = stages<Op::kAllGatherMatmul>();
  targets["entwine_signal_matmul_reduce_scatter"] = stages<Op::kMatmulReduceScatter>();
  targets["entwine_signal_matmul_all_reduce"] = stages<Op::kMatmulAllReduce>();
  return targets;
}

}  // namespace entwine
