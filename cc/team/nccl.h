// The few NCCL functions that an arena or strategy "signal" needs, bound at run time to the NCCL that JAX has loaded.
//
// Nothing links NCCL: a second copy in the process would have its own communicators, and the extension must load without any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct CUstream_st;

namespace entwine::team {

using NcclComm = void*;    // ncclComm_t
using NcclWindow = void*;  // ncclWindow_t, a pointer to device memory

struct Nccl {
  int version;  // 22809 is 2.28.9
  std::string path;
  char const* (*error_string)(int);
  int (*comm_count)(NcclComm, int*);
  int (*comm_user_rank)(NcclComm, int*);
  int (*mem_alloc)(void**, size_t);
  int (*mem_free)(void*);
  int (*window_register)(NcclComm, void*, size_t, NcclWindow*, int flags);
  int (*all_reduce)(void const*, void*, size_t, int type, int op, NcclComm, CUstream_st*);
  int (*peer_pointer)(NcclWindow, size_t offset, int peer, void**);  // from 2.29 on, else null

  // What moves groups of tiles; an arena does without.
  int (*reduce_scatter)(void const*, void*, size_t, int type, int op, NcclComm, CUstream_st*);
  int (*all_gather)(void const*, void*, size_t, int type, NcclComm, CUstream_st*);
  int (*send)(void const*, size_t, int type, int peer, NcclComm, CUstream_st*);
  int (*recv)(void*, size_t, int type, int peer, NcclComm, CUstream_st*);
  int (*group_start)();
  int (*group_end)();
  int (*async_error)(NcclComm, int*);
  bool moves_groups() const {
    return reduce_scatter != nullptr && all_gather != nullptr && send != nullptr && recv != nullptr && group_start != nullptr &&
           group_end != nullptr && async_error != nullptr;
  }
};

// "", or what a function returned. A communicator that doesn't block (XLA's do) may still be at it: that is waited for, so long
// at most (0: without end).
std::string settled(Nccl const& nccl, NcclComm communicator, char const* function, int returned, uint64_t timeout_ns);

// 22809 as "2.28.9".
std::string dotted(int version);

// The table, or why there is none: no NCCL loaded, two of them, or one too old. Looked up once it succeeds.
Nccl const* bind_nccl(std::string* why);

}  // namespace entwine::team
