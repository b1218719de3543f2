"""Programs dispatched far ahead of their execution, on as few CPUs as a small machine has: none may wait for ever.

One thread dispatches all of its programs at once; several together no more than XLA's CPU client can have of a device
(32), past which their launches may wait for each other: entwine_jax/_threads.py.

Arguments: how many devices, threads that dispatch, rounds of each thread.
"""

import collections
import faulthandler
import os
import sys
import threading

devices, threads, rounds = map(int, sys.argv[1:])
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
faulthandler.dump_traceback_later(60, exit=True)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import entwine_jax  # noqa: E402

mesh = jax.make_mesh((devices,), ("t",))
rows, columns = P("t", None), P(None, "t")


def program(op, x, w, y):
    rank = lambda x, w: op(x, w, "t", strategy="fused")  # noqa: E731
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x, w), out_specs=y))


gather = program(entwine_jax.all_gather_matmul, rows, columns, columns)
scatter = program(entwine_jax.matmul_reduce_scatter, columns, rows, rows)
reduce = program(entwine_jax.matmul_all_reduce, columns, rows, P(None, None))

size = 16 * devices
x = np.random.default_rng(0).integers(-9, 9, (size, size)).astype(np.float32)
one = np.eye(size, dtype=np.float32)
x_rows, x_columns = (jax.device_put(x, NamedSharding(mesh, spec)) for spec in (rows, columns))
one_rows, one_columns = (jax.device_put(one, NamedSharding(mesh, spec)) for spec in (rows, columns))


def independent():
    for op, operands in ((gather, (x_rows, one_columns)), (scatter, (x_columns, one_rows))):  # each on its own
        yield from (op(*operands) for _ in range(rounds))
    for _ in range(rounds):
        yield gather(x_rows, one_columns)
        yield scatter(x_columns, one_rows)
        yield reduce(x_columns, one_rows)


def dependent():
    y = x_rows
    for _ in range(rounds):
        y = scatter(gather(y, one_columns), one_rows)
        yield y
    yield reduce(gather(y, one_columns), one_rows)


wrong = []


def work(programs):
    try:
        ahead = collections.deque()
        for y in programs():
            ahead.append(y)
            if threads > 1 and len(ahead) >= 16 // threads:  # those of dependent() are two programs each
                np.testing.assert_array_equal(np.asarray(ahead.popleft()), x)
        for y in ahead:
            np.testing.assert_array_equal(np.asarray(y), x)
    except Exception as error:
        wrong.append(error)


workers = [threading.Thread(target=work, args=((independent, dependent)[i % 2],)) for i in range(threads)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
sys.exit(str(wrong[0]) if wrong else 0)
