"""A kernel of somebody else that keeps multiprocessors for itself for a while, on a stream that XLA knows nothing of.

By the driver's own interface, so that it needs no compiler: what it runs is PTX.
"""

from __future__ import annotations

import ctypes

# Looks at the clock until `ns` nanoseconds are over.
PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry spin(.param .u64 ns)
{
  .reg .u64 %now, %end;
  .reg .pred %early;
  ld.param.u64 %end, [ns];
  mov.u64 %now, %globaltimer;
  add.u64 %end, %end, %now;
again:
  nanosleep.u32 1000;
  mov.u64 %now, %globaltimer;
  setp.lt.u64 %early, %now, %end;
  @%early bra again;
  ret;
}
"""
SHARED = 200 << 10  # so that a block has a multiprocessor to itself
MULTIPROCESSOR_COUNT, MAX_DYNAMIC_SHARED, NON_BLOCKING, NOT_READY = 16, 8, 1, 600


class Spinner:
    """On one GPU, which JAX has used already."""

    def __init__(self, ordinal: int) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", ctypes.byref(device), ordinal)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        count, module = ctypes.c_int(), ctypes.c_void_p()
        self.function, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSOR_COUNT, device)
        self.multiprocessors = count.value
        self._in_context("cuModuleLoadData", ctypes.byref(module), PTX)
        self._in_context("cuModuleGetFunction", ctypes.byref(self.function), module, b"spin")
        self._in_context("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, SHARED)
        self._in_context("cuStreamCreate", ctypes.byref(self.stream), NON_BLOCKING)
        self.start(0.0, 1)  # what is loaded at the first launch is loaded now
        self.wait()

    def start(self, seconds: float, blocks: int) -> None:
        """One multiprocessor a block."""
        ns = ctypes.c_uint64(int(seconds * 1e9))
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(ns), ctypes.c_void_p))
        grid, block = (blocks, 1, 1), (32, 1, 1)
        self._in_context("cuLaunchKernel", self.function, *grid, *block, SHARED, self.stream, arguments, None)

    def spins(self) -> bool:
        return self._in_context("cuStreamQuery", self.stream, allowed=(0, NOT_READY)) == NOT_READY

    def wait(self) -> None:
        self._in_context("cuStreamSynchronize", self.stream)

    def _in_context(self, name: str, *arguments: object, allowed: tuple[int, ...] = (0,)) -> int:
        self._check("cuCtxPushCurrent_v2", self.context)
        try:
            return self._check(name, *arguments, allowed=allowed)
        finally:
            self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _check(self, name: str, *arguments: object, allowed: tuple[int, ...] = (0,)) -> int:
        code: int = getattr(self.cuda, name)(*arguments)
        if code not in allowed:
            raise RuntimeError(f"{name} returned {code}")
        return code
