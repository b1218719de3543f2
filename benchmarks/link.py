"""The link alone: every rank sends its chunk to every peer at once, by copy engine, through CUDA's driver API.

The copy engine is the fastest mechanism there is for whole chunks, faster than a kernel's stores and than NCCL, so its
time is the floor. No Python package is needed for it: `libcuda.so.1` is loaded in every CUDA process, and contexts
are the primary ones, which JAX uses too.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

_STREAM_NON_BLOCKING = 1
_PEER_ACCESS_ALREADY_ENABLED = 704


class LinkError(Exception):
    """The copy engine can't be driven here."""


class CopyEngine:
    """Pushes `chunk_bytes` from each of these GPUs to each other; a context manager, for it owns memory."""

    def __init__(self, ordinals: Sequence[int], chunk_bytes: int, buffers: int) -> None:
        self._ranks, self._bytes, self._buffers = range(len(ordinals)), chunk_bytes, buffers
        self._contexts: list[ctypes.c_void_p] = []
        self._streams: list[ctypes.c_void_p] = []
        self._memory: list[tuple[int, ctypes.c_uint64]] = []
        self._devices: list[ctypes.c_int] = []
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LinkError(str(error)) from error
        try:
            self._open(ordinals)
            self._copies = self._prepare()
            self._verify()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CopyEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Best effort: whatever is wrong has been said already."""
        for rank, address in self._memory:
            with contextlib.suppress(LinkError), self._current(rank):
                self._call("cuMemFree_v2", address)
        for rank, stream in enumerate(self._streams):
            with contextlib.suppress(LinkError), self._current(rank):
                self._call("cuStreamDestroy_v2", stream)
        for device in self._devices[: len(self._contexts)]:
            with contextlib.suppress(LinkError):
                self._call("cuDevicePrimaryCtxRelease_v2", device)
        self._memory, self._streams, self._contexts, self._devices = [], [], [], []

    def sample(self, repeats: int) -> float:
        """Seconds for so many pushes in a row, both directions of every pair at once."""
        start = time.perf_counter()
        for turn in range(repeats):
            # Round the ranks in the inner loop: all start together.
            for arguments in self._copies[turn % self._buffers]:
                self._call("cuMemcpyPeerAsync", *arguments)
        for rank in self._ranks:
            with self._current(rank):
                self._call("cuStreamSynchronize", self._streams[rank])
        return time.perf_counter() - start

    def _call(self, function: str, *arguments: Any, allow: int = 0) -> None:
        status = int(getattr(self._cuda, function)(*arguments))
        if status not in (0, allow):
            raise LinkError(f"{function} returned CUDA error {status}")

    @contextlib.contextmanager
    def _current(self, rank: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._contexts[rank])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _open(self, ordinals: Sequence[int]) -> None:
        self._call("cuInit", ctypes.c_uint(0))
        for ordinal in ordinals:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self._devices.append(device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts.append(context)
        for rank, peer in itertools.permutations(self._ranks, 2):
            possible = ctypes.c_int()
            self._call("cuDeviceCanAccessPeer", ctypes.byref(possible), self._devices[rank], self._devices[peer])
            if not possible.value:  # the copy would go through host memory
                raise LinkError(f"GPU {ordinals[rank]} can't access GPU {ordinals[peer]}")
            with self._current(rank):
                self._call(
                    "cuCtxEnablePeerAccess", self._contexts[peer], ctypes.c_uint(0), allow=_PEER_ACCESS_ALREADY_ENABLED
                )
        for rank in self._ranks:
            stream = ctypes.c_void_p()
            with self._current(rank):
                self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
            self._streams.append(stream)

    def _allocate(self, rank: int, word: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        with self._current(rank):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self._bytes))
            self._memory.append((rank, address))
            self._call("cuMemsetD32_v2", address, ctypes.c_uint(word), ctypes.c_size_t(self._bytes // 4))
            self._call("cuCtxSynchronize")
        return address

    def _prepare(self) -> list[list[tuple[Any, ...]]]:
        """For every buffer the arguments of its copies: (to, its context, from, its context, bytes, stream)."""
        size, copies = ctypes.c_size_t(self._bytes), []
        for _ in range(self._buffers):
            sources = [self._allocate(rank, rank + 1) for rank in self._ranks]
            copies.append(
                [
                    (self._allocate(peer, 0), self._contexts[peer], sources[rank], self._contexts[rank], size, stream)
                    for rank, stream in enumerate(self._streams)
                    for peer in self._ranks
                    if peer != rank
                ]
            )
        return copies

    def _verify(self) -> None:
        """Runs every copy once and looks at the last word of what arrived."""
        self.sample(self._buffers)
        for to, _, source, _, size, _ in itertools.chain.from_iterable(self._copies):
            words = []
            for address in (source, to):
                rank = next(rank for rank, owned in self._memory if owned is address)
                word = ctypes.c_uint32()
                with self._current(rank):
                    last = ctypes.c_uint64(address.value + size.value - 4)
                    self._call("cuMemcpyDtoH_v2", ctypes.byref(word), last, ctypes.c_size_t(4))
                words.append(word.value)
            if words[0] != words[1] or not words[0]:
                raise LinkError(f"a copy did not arrive: sent {words[0]}, found {words[1]}")
