/* Stands in for an NCCL of version FAKE_NCCL_VERSION: nccl_test.cc loads it and asks what bind_nccl says. */
#include <stddef.h>

int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}
char const* ncclGetErrorString(int code) { return code == 0 ? "no error" : "fake error"; }
int ncclCommCount(void* comm, int* count) { return comm == NULL ? 1 : (*count = 2, 0); }
int ncclCommUserRank(void* comm, int* rank) { return comm == NULL ? 1 : (*rank = 1, 0); }
int ncclMemAlloc(void** memory, size_t bytes) { return memory == NULL || bytes == 0; }
int ncclMemFree(void* memory) { return memory == NULL; }
int ncclAllReduce(void) { return 1; }
#if FAKE_NCCL_VERSION >= 22700
int ncclCommWindowRegister(void) { return 1; }
#endif
