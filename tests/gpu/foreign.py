"""A kernel of somebody else that keeps multiprocessors for itself for a while, on a stream that XLA knows nothing of.

By the driver's own interface, so that it needs no compiler: what it runs is PTX.
"""

from __future__ import annotations

import ctypes
import time

import jax
from company import Checked
from harness import mesh_of

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
        self.device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self.device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)
        count, module = ctypes.c_int(), ctypes.c_void_p()
        self.function, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSOR_COUNT, self.device)
        self.multiprocessors = count.value
        self._call("cuCtxPushCurrent_v2", self.context)
        self._call("cuModuleLoadData", ctypes.byref(module), PTX)
        self._call("cuModuleGetFunction", ctypes.byref(self.function), module, b"spin")
        self._call("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, SHARED)
        self._call("cuStreamCreate", ctypes.byref(self.stream), NON_BLOCKING)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self.start(0.0, 1)  # what is loaded at the first launch is loaded now
        self.wait()

    def start(self, seconds: float, blocks: int) -> None:
        ns = ctypes.c_uint64(int(seconds * 1e9))
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(ns), ctypes.c_void_p))
        self._call("cuCtxPushCurrent_v2", self.context)
        grid, block = (blocks, 1, 1), (32, 1, 1)
        self._call("cuLaunchKernel", self.function, *grid, *block, SHARED, self.stream, arguments, None)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def spins(self) -> bool:
        code = self.cuda.cuStreamQuery(self.stream)
        if code not in (0, NOT_READY):
            raise RuntimeError(f"cuStreamQuery returned {code}")
        return bool(code == NOT_READY)

    def wait(self) -> None:
        self._call("cuStreamSynchronize", self.stream)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")


def foreign_kernel(seconds: float = 0.6) -> None:
    """Three quarters of the multiprocessors are somebody else's for a while, or all of them, of all GPUs or of one,
    before our calls or after some of them."""
    mesh = mesh_of()
    checked = Checked(mesh)
    checked.warm()
    spinners = [Spinner(device.local_hardware_id) for device in mesh.devices.flat]
    for some in (spinners, spinners[:1], spinners[-1:]):
        for ours_first in (False, True):
            for share in (0.75, 1.0):
                launched = [checked.launch(i) for i in range(12 * ours_first)]
                start = time.monotonic()
                for spinner in some:
                    spinner.start(seconds if share < 1 else seconds / 3, int(spinner.multiprocessors * share))
                launched += [checked.launch(i) for i in range(12)]
                jax.block_until_ready([y for _, y in launched])
                elapsed, spinning = time.monotonic() - start, all(spinner.spins() for spinner in some)
                for each in launched:
                    checked.check(each)
                what = f"{share:.0%} of {len(some)} GPUs taken, {'ours' if ours_first else 'theirs'} first"
                print(f"{what}: ours ended after {elapsed:.3f} s, theirs {'spin' if spinning else 'ended'}", flush=True)
                # A quarter of a GPU is enough: nothing waits for what isn't resident.
                assert share == 1 or spinning, f"{what}: our calls have waited for a kernel that isn't theirs"
                for spinner in some:
                    spinner.wait()
