#include "team/nccl.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdlib.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

namespace entwine::team {
namespace {

constexpr int kOldest = 22800;  // windows on plain communicators
// NCCL's number.
constexpr int kInProgress = 7;

// Paths of every NCCL in the process.
std::set<std::string> loaded_nccl() {
  std::set<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        std::string path = info->dlpi_name;
        if (path.find("libnccl.so") != std::string::npos) {
          char real[PATH_MAX];
          static_cast<std::set<std::string>*>(out)->insert(realpath(path.c_str(), real) ? real : path);
        }
        return 0;
      },
      &paths);
  return paths;
}

std::optional<Nccl> load(std::string* why) {
  std::set<std::string> paths = loaded_nccl();
  if (paths.empty()) {
    *why = "no NCCL is loaded in this process: install jax[cuda13], which brings it";
    return std::nullopt;
  }
  if (paths.size() > 1) {
    *why = "NCCL is loaded more than once (";
    for (auto it = paths.begin(); it != paths.end(); ++it) *why += (it == paths.begin() ? "" : ", ") + *it;
    *why += "): keep one, for instance by taking the others off LD_LIBRARY_PATH";
    return std::nullopt;
  }
  void* library = dlopen(paths.begin()->c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    *why = "NCCL at " + *paths.begin() + " can't be opened: " + dlerror();
    return std::nullopt;
  }
  Nccl nccl{};
  nccl.path = *paths.begin();
  auto bind = [&](auto& function, char const* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  int (*get_version)(int*) = nullptr;
  if (bind(get_version, "ncclGetVersion")) get_version(&nccl.version);
  bool all = bind(nccl.error_string, "ncclGetErrorString") && bind(nccl.comm_count, "ncclCommCount") &&
             bind(nccl.comm_user_rank, "ncclCommUserRank") && bind(nccl.mem_alloc, "ncclMemAlloc") &&
             bind(nccl.mem_free, "ncclMemFree") && bind(nccl.window_register, "ncclCommWindowRegister") &&
             bind(nccl.all_reduce, "ncclAllReduce");
  if (!all || nccl.version < kOldest) {
    *why = "NCCL " + dotted(nccl.version) + " at " + *paths.begin() +
           " is too old: 2.28.0 or newer is needed, for instance by " + "pip install 'nvidia-nccl-cu13>=2.28.9'";
    return std::nullopt;
  }
  bind(nccl.peer_pointer, "ncclGetPeerDevicePointer");
  bind(nccl.reduce_scatter, "ncclReduceScatter");
  bind(nccl.all_gather, "ncclAllGather");
  bind(nccl.send, "ncclSend");
  bind(nccl.recv, "ncclRecv");
  bind(nccl.group_start, "ncclGroupStart");
  bind(nccl.group_end, "ncclGroupEnd");
  bind(nccl.async_error, "ncclCommGetAsyncError");
  return nccl;
}

}  // namespace

std::string settled(Nccl const& nccl, NcclComm communicator, char const* function, int returned, uint64_t timeout_ns) {
  using Clock = std::chrono::steady_clock;
  auto start = Clock::now();
  while (returned == kInProgress && nccl.async_error != nullptr &&
         (timeout_ns == 0 || Clock::now() - start < std::chrono::nanoseconds(timeout_ns))) {
    std::this_thread::sleep_for(std::chrono::microseconds(5));
    if (nccl.async_error(communicator, &returned) != 0) break;
  }
  return returned == 0 ? "" : std::string(function) + ": " + nccl.error_string(returned);
}

std::string dotted(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

Nccl const* bind_nccl(std::string* why) {
  static std::mutex mutex;
  static std::optional<Nccl> table;
  std::lock_guard<std::mutex> lock(mutex);
  if (!table) table = load(why);
  return table ? &*table : nullptr;
}

}  // namespace entwine::team
