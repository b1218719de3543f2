"""Our ops while a kernel of somebody else's has multiprocessors for itself. On GPUs only."""

from __future__ import annotations

import time

import jax
from company import Checked
from harness import mesh_of
from spinner import Spinner


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
