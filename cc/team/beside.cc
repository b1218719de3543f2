#include "team/beside.h"

#include <algorithm>
#include <map>
#include <memory>

#include "team/device_scope.h"
#include "team/first_epoch.h"
#include "team/stream_values.h"
#include "team/vote.h"

namespace entwine::team {
namespace {

// NCCL's number.
constexpr int kSum = 0;
// To warm up with, of each rank: NCCL does as much more in the same way.
constexpr size_t kWarmElements = size_t{1} << 22, kElementBytes = 2;

// Of what CUDA copies as rows of a matrix.
constexpr size_t kMaxPitch = (size_t{1} << 31) - 1;

std::string cuda(char const* what, cudaError_t error) {
  return error == cudaSuccess ? "" : std::string(what) + ": " + cudaGetErrorString(error);
}

}  // namespace

Beside* Beside::of(NcclComm communicator, int device, std::string* why) {
  static std::mutex mutex;
  static auto* all = new std::map<NcclComm, std::unique_ptr<Beside>>;  // never destroyed: XLA may outlive statics
  std::lock_guard<std::mutex> lock(mutex);
  auto found = all->find(communicator);
  if (found != all->end()) return found->second.get();
  Nccl const* nccl = bind_nccl(why);
  if (nccl == nullptr) return nullptr;
  std::unique_ptr<Beside> made(new Beside(nccl, communicator, device));
  *why = made->start();
  if (!why->empty()) return nullptr;
  return (*all)[communicator] = std::move(made), (*all)[communicator].get();
}

std::string Beside::start() {
  if (!nccl_->moves_groups()) return "NCCL " + dotted(nccl_->version) + " at " + nccl_->path + " lacks a collective";
  if (std::string why = stream_values_unsupported(); !why.empty()) return why;
  int count = nccl_->comm_count(communicator_, &size_), user = nccl_->comm_user_rank(communicator_, &rank_);
  if (count != 0 || user != 0)
    return std::string("XLA's communicator can't be read: ") + nccl_->error_string(count != 0 ? count : user);
  DeviceScope scope(device_);
  int least = 0, greatest = 0;
  std::string why = cuda("stream priorities", cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // NCCL's blocks go before the matmul's, where there is a choice.
  if (why.empty()) why = cuda("a stream", cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  if (why.empty()) why = cuda("an event", cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming));
  for (cudaEvent_t& event : events_)
    if (why.empty()) why = cuda("an event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  if (why.empty()) why = cuda("memory", cudaMalloc(reinterpret_cast<void**>(&vote_), sizeof(int)));
  if (why.empty()) why = cuda("memory", cudaMalloc(reinterpret_cast<void**>(&stamp_), sizeof(uint32_t)));
  return why.empty() ? watch_.start(device_, rank_, size_) : why;
}

std::string Beside::done(char const* what, int nccl) const {
  return settled(*nccl_, communicator_, what, nccl, patience_.timeout_ns);
}

std::string Beside::begin(Patience const& patience, std::string what) {
  patience_ = patience;
  return watch_.begin(stream_, patience, std::move(what));
}

std::string Beside::end() { return watch_.end(stream_); }

std::string Beside::warm_up(Patience const& patience, std::vector<size_t> const& counts, int type) {
  schedule::Op op = patience.op;
  std::lock_guard<std::mutex> lock(mutex_);
  std::set<size_t> missing;
  for (size_t each : counts)
    if (size_t count = std::min(each, kWarmElements); warm_.insert({op, count}).second) missing.insert(count);
  if (missing.empty()) return "";
  uint8_t* memory = nullptr;
  size_t bytes = *missing.rbegin() * kElementBytes * static_cast<size_t>(size_);
  bool room = cudaMalloc(reinterpret_cast<void**>(&memory), bytes) == cudaSuccess;
  if (!room) cudaGetLastError();
  std::string why = begin(patience, "the first collectives");
  if (why.empty()) why = vote(*nccl_, communicator_, stream_, vote_, patience.timeout_ns, &room);
  if (room)  // else none warms up: slower and later, no more
    for (size_t count : missing)
      if (why.empty()) why = try_out(op, memory, count, type);
  std::string ended = end();
  if (why.empty()) why = ended;
  if (why.empty()) why = cuda("NCCL's first collectives", cudaStreamSynchronize(stream_));
  cudaFree(memory);
  return why;
}

std::string Beside::try_out(schedule::Op op, uint8_t* memory, size_t count, int type) {
  if (op == schedule::Op::kMatmulAllReduce) return sum(memory, count, type);
  if (op == schedule::Op::kMatmulReduceScatter) return sum_and_scatter(memory, count, type);
  auto chunk = [&](int rank) { return memory + static_cast<size_t>(rank) * count * kElementBytes; };
  std::string why = gather(chunk(rank_), memory, count, type);
  if (why.empty()) why = pieces(true);
  if (!why.empty()) return why;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && why.empty()) why = exchange(chunk(rank_), chunk(peer), count, type, peer);
  std::string end = pieces(false);
  return why.empty() ? end : why;
}

std::string Beside::follow(cudaStream_t main) {
  std::string why = cuda("event", cudaEventRecord(forked_, main));
  return why.empty() ? cuda("event", cudaStreamWaitEvent(stream_, forked_, 0)) : why;
}

std::string Beside::mark(uint32_t event) { return cuda("event", cudaEventRecord(events_[event], stream_)); }

std::string Beside::join(cudaStream_t main, uint32_t event) {
  return cuda("event", cudaStreamWaitEvent(main, events_[event], 0));
}

std::string Beside::await(uint32_t const* counter, uint32_t value) { return await_value(stream_, counter, value); }

std::string Beside::sum(void* tiles, size_t count, int type) {
  return done("ncclAllReduce", nccl_->all_reduce(tiles, tiles, count, type, kSum, communicator_, stream_));
}

std::string Beside::sum_and_scatter(void* tiles, size_t count, int type) {
  void* mine = static_cast<uint8_t*>(tiles) + static_cast<size_t>(rank_) * count * kElementBytes;
  return done("ncclReduceScatter", nccl_->reduce_scatter(tiles, mine, count, type, kSum, communicator_, stream_));
}

std::string Beside::gather(void const* own, void* whole, size_t count, int type) {
  return done("ncclAllGather", nccl_->all_gather(own, whole, count, type, communicator_, stream_));
}

std::string Beside::pieces(bool begin) {
  return begin ? done("ncclGroupStart", nccl_->group_start()) : done("ncclGroupEnd", nccl_->group_end());
}

std::string Beside::exchange(void const* own, void* theirs, size_t count, int type, int peer) {
  std::string why = done("ncclSend", nccl_->send(own, count, type, peer, communicator_, stream_));
  return why.empty() ? done("ncclRecv", nccl_->recv(theirs, count, type, peer, communicator_, stream_)) : why;
}

uint32_t Beside::next_epoch(Arena const* arena) { return epochs_.try_emplace(arena, first_epoch()).first->second++; }

std::string Beside::stamp(uint32_t value) { return write_value(stream_, stamp_, value); }

std::string Beside::push(void* to, void const* from, size_t bytes) {
  return cuda("a group's copy", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
}

std::string Beside::raise(uint32_t* word) {
  return cuda("a group's signal", cudaMemcpyAsync(word, stamp_, sizeof *word, cudaMemcpyDeviceToDevice, stream_));
}

std::string Beside::copy(void* to, size_t to_pitch, void const* from, size_t from_pitch, size_t bytes, size_t rows) {
  if (rows > 1 && to_pitch <= kMaxPitch)
    return cuda("own rows", cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, cudaMemcpyDeviceToDevice, stream_));
  std::string why;
  for (size_t row = 0; row < rows && why.empty(); ++row)
    why = cuda("own rows",
               cudaMemcpyAsync(static_cast<uint8_t*>(to) + row * to_pitch, static_cast<uint8_t const*>(from) + row * from_pitch,
                               bytes, cudaMemcpyDeviceToDevice, stream_));
  return why;
}

}  // namespace entwine::team
