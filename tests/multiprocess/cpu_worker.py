"""One of the two processes of tests/test_multiprocess.py."""

import os
import sys
import tempfile

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import _contest, _obstacles, _tuned
from entwine_jax._agreed import agreed

address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=process)
mesh = Mesh(np.array(jax.devices()), ("t",))
assert mesh.size == 4 and jax.process_count() == 2

whole_x = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
whole_w = np.arange(6 * 8, dtype=np.float32).reshape(6, 8) - 20
x, w = (
    jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index, whole=whole: whole[index])
    for whole, spec in ((whole_x, P("t")), (whole_w, P(None, "t")))
)


def op(strategy):
    return jax.jit(
        jax.shard_map(
            lambda x, w: entwine_jax.all_gather_matmul(x, w, "t", strategy=strategy),
            mesh=mesh,
            in_specs=(P("t"), P(None, "t")),
            out_specs=P(None, "t"),
        )
    )


try:
    op("fused")(x, w)
    raise SystemExit("strategy='fused' ran across processes")
except NotImplementedError as error:
    assert "all_gather_matmul" in str(error) and "within one process" in str(error), error

(matmul,) = entwine_jax.explain(op("auto"), x, w)
assert matmul.strategy == "xla"
for shard in op("auto")(x, w).addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), (whole_x @ whole_w)[shard.index])

# Process 0 decides what is fastest, and what is known, whatever the others find in their own files.
assert agreed({"process": process, "text": "\u00e9" * (process + 1)}) == {"process": 0, "text": "\u00e9"}
(row,) = entwine_jax.autotune(op("auto"), x, w)
assert "within one process" in row.status and row.strategy is None, row


class Bench:
    """Process 0 has large tiles for fast, process 1 small ones."""

    measured = 0

    def __init__(self, product):
        Bench.measured += 1

    def sampler(self, plan):
        fast = plan is not None and plan.tile_m == (64 if process == 0 else 16)
        return lambda repeats: agreed(repeats * (1e-3 if fast else 2e-3))


_obstacles._cpu_obstacle = lambda *_: None
_contest.Bench = Bench
with tempfile.TemporaryDirectory() as own:
    os.environ |= {"ENTWINE_CACHE_DIR": own}
    os.environ.pop("ENTWINE_TUNED", None)
    for status in ("measured", "known already"):
        (row,) = entwine_jax.autotune(op("auto"), x, w)
        assert row.status.startswith(status) and (row.strategy, row.plan.tile_m) == ("fused", 64), row
        (matmul,) = entwine_jax.explain(op("auto"), x, w)
        assert matmul.plan.tile_m == 64 and matmul.reason.endswith("(this process)"), matmul
        # Then process 0 alone has a file; nobody but autotune looks into it.
        _tuned.forget()
        if process == 1:
            _tuned.path_of("cpu").unlink(missing_ok=True)
        (matmul,) = entwine_jax.explain(op("auto"), x, w)
        assert matmul.strategy == "xla", matmul
    assert Bench.measured == 1
print("ok")
