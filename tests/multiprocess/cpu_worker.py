"""One of the two processes of tests/test_multiprocess.py."""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

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
print("ok")
