"""A quick look at all fused ops on this machine's GPUs, small shapes first, before the tests: what works, where not.

Every line names its case before the call, so that a hang shows which one hangs.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

os.environ.setdefault("ENTWINE_TIMEOUT_S", "10")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "gpu"))

import harness  # type: ignore[import-not-found]
import jax

# m_shard, n, k: one tile and one k block; more of each; tails in each; a batch; several waves.
SHAPES: tuple[tuple[int, int, int, tuple[int, ...]], ...] = (
    (256, 256, 64, ()),
    (256, 256, 512, ()),
    (1024, 256, 64, ()),
    (256, 1024, 64, ()),
    (1024, 1024, 1024, ()),
    (256, 264, 64, ()),
    (256, 256, 72, ()),
    (129, 256, 64, ()),
    (1, 8, 8, ()),
    (100, 136, 72, (3,)),
    (2048, 2048, 512, ()),
)


def look(case: harness.Case, seeds: int = 3) -> bool:
    mesh = harness.mesh_of()
    ranks = harness.team_size(mesh)
    x_spec, w_spec, _ = case.specs(harness.AXIS)
    print(f"{case}: ", end="", flush=True)
    start = time.monotonic()
    try:
        for seed in range(seeds):
            x, w = harness.integers(case, ranks, seed)
            harness.poison(case, mesh)
            y = harness.program(case, mesh)(harness.put(x, mesh, x_spec), harness.put(w, mesh, w_spec))
            message = harness.mismatches(case, y, harness.exact_product(case, ranks, x, w))
            if message:
                print(f"BAD in call {seed + 1}: {message}", flush=True)
                return False
    except Exception as error:
        print(f"BAD: {type(error).__name__}: {str(error)[:2000]}", flush=True)
        return False
    print(f"ok ({time.monotonic() - start:.1f} s)", flush=True)
    return True


def main() -> None:
    print(f"jax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}", flush=True)
    cases = [harness.Case(op, m_shard, n, k, batch) for m_shard, n, k, batch in SHAPES for op in harness.OPS]
    good = sum([look(case) for case in cases])
    print(f"smoke: {good} of {len(cases)} ok", flush=True)
    sys.stdout.flush()
    # Not sys.exit: after a failed kernel the devices may keep the interpreter from ending.
    os._exit(good != len(cases))


if __name__ == "__main__":
    main()
