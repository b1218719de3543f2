"""Strategy "signal": NCCL moves groups of tiles beside the matmul. Exact, repeated, gradients, without peer access."""

import itertools
import os

import jax
import jax.numpy as jnp
import lockstep
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    AXIS,
    OPS,
    REDUCE_SCATTER,
    Case,
    assert_close,
    assert_equal,
    check_exact,
    copies,
    count_different,
    exact_product,
    gaussians,
    integers,
    mesh_of,
    on_device,
    per_shard,
    placed,
    poison,
    program,
    put,
    reference,
    relative_error,
    spread,
    team_size,
    whole,
)
from jax.sharding import PartitionSpec as P
from test_gpu_children import GRAPHS, finish, start

import entwine_jax
from benchmarks.shapes import TEN
from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

# Small groups: a wave each, of one or few clusters.
MANY = Config(comm_sms=120, group_waves=1)


@pytest.mark.parametrize("config", [None, MANY], ids=["searched", "many groups"])
@pytest.mark.parametrize("op", OPS)
def test_exact(op, config):
    """Tails in all directions, and batches."""
    for (m_shard, n, k), batch in itertools.product(((129, 136, 72), (300, 1032, 520), (600, 2056, 1032)), ((), (3,))):
        check_exact(Case(op, m_shard, n, k, batch, odd=1 if op == ALL_REDUCE else 0), strategy="signal", config=config)


@pytest.mark.parametrize("op", OPS)
def test_tiles_and_types(op):
    case = Case(op, 520, 776, 264)
    for dtype, tile_n in itertools.product((jnp.bfloat16, jnp.float16), (256, 128)):
        config = Config(tile_m=256, tile_n=tile_n, comm_sms=100, group_waves=2)
        check_exact(case, operand=dtype, strategy="signal", config=config)


@pytest.mark.parametrize("shape", TEN, ids=str)
def test_benchmark_shapes(shape):
    """Integers to the bit; two runs agree to the bit, on numbers whose sums are rounded too."""
    mesh = mesh_of()
    case = Case(shape.op, shape.m // team_size(mesh), shape.n, shape.k)
    run, exact = program(case, mesh, strategy="signal"), reference(case, mesh)
    x, w = on_device(case, mesh, integer=True, seed=1)
    want, largest = exact(x, w)
    assert float(largest) <= 256, "the test's inputs are too large"
    poison(case, mesh)
    got = run(x, w)
    if int(count_different(got, want)):
        assert_equal(case, got, want)
    x, w = on_device(case, mesh, integer=False, seed=2)
    got = run(x, w)
    assert_close(case, got, exact(x, w)[0], 4e-3)
    assert int(count_different(run(x, w), got)) == 0


@pytest.mark.parametrize("op", OPS)
def test_repeated(op):
    """Many calls in a row without a pause, by turns with fused ones, on changing inputs."""
    case, mesh = Case(op, 392, 1032, 520), mesh_of()
    ranks = team_size(mesh)
    inputs = [gaussians(case, ranks, seed) for seed in range(5)]
    inputs = [placed(case, mesh, *each) for each in inputs]
    ours, fused = program(case, mesh, strategy="signal", config=MANY), program(case, mesh)
    alone = [jax.block_until_ready(ours(*each)) for each in inputs]
    for each, y in zip(inputs, alone, strict=True):
        assert_close(case, y, reference(case, mesh)(*each)[0], 4e-3)
    together = []
    for i in range(60):
        together.append(ours(*inputs[i % 5]))
        fused(*inputs[(i + 2) % 5])
    bad = [i for i, y in enumerate(together) if int(count_different(y, alone[i % 5]))]
    assert not bad, f"{case}: calls {bad} differ from those that ran alone"


@pytest.mark.parametrize("op", OPS)
def test_epilogue(op):
    """relu of the sum and a bias, all of whole numbers."""
    case, mesh = Case(op, 300, 776, 264, (2,)), mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, 5)
    bias = np.random.default_rng(6).integers(-8, 9, case.w_shape(ranks)[1]).astype(np.float32)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    b_spec = P(AXIS) if op == ALL_GATHER else P()

    def rank(x, w, b):
        return getattr(entwine_jax, op)(x, w, AXIS, bias=b, activation="relu", strategy="signal")

    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x_spec, w_spec, b_spec), out_specs=y_spec))
    got = run(*placed(case, mesh, x, w), put(bias, mesh, b_spec))
    want = np.maximum(exact_product(case, ranks, x, w) + bias, 0).astype(jnp.bfloat16)
    assert_equal(case, got, want)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("config", [None, MANY], ids=["searched", "many groups"])
def test_gathered(batch, config):
    case, mesh = Case(ALL_GATHER, 600, 520, 264, batch), mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, 1)
    x_spec, w_spec, y_spec = case.specs(AXIS)

    def rank(x, w):
        return entwine_jax.all_gather_matmul(x, w, AXIS, return_gathered=True, strategy="signal", config=config)

    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=(y_spec, y_spec)))
    y, rows = run(*placed(case, mesh, x, w))
    assert_equal(case, y, exact_product(case, ranks, x, w))
    for copy in np.split(whole(rows), ranks, axis=-1):
        np.testing.assert_array_equal(copy, x)


def test_gradients():
    """Of a sequence-parallel two-layer MLP, against XLA's."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    up, down = Case(ALL_GATHER, 512, 1024, 256 * ranks), Case(REDUCE_SCATTER, 512, 256 * ranks, 1024)
    x, w_up = gaussians(up, ranks, 1)
    _, w_down = gaussians(down, ranks, 2)
    (x_spec, up_spec, _), (_, down_spec, y_spec) = up.specs(AXIS), down.specs(AXIS)

    def loss(strategy):
        first, second = (per_shard(case, strategy=strategy) for case in (up, down))
        rank = lambda x, a, b: second(jnp.tanh(first(x, a)), b)  # noqa: E731
        f = jax.shard_map(rank, mesh=mesh, in_specs=(x_spec, up_spec, down_spec), out_specs=y_spec)
        return lambda *v: jnp.mean(jnp.square(f(*v).astype(jnp.float32)))

    args = put(x, mesh, x_spec), put(w_up, mesh, up_spec), put(w_down, mesh, down_spec)
    ours, theirs = (jax.jit(jax.grad(loss(strategy), (0, 1, 2)))(*args) for strategy in ("signal", "xla"))
    for a, b in zip(ours, theirs, strict=True):
        assert float(relative_error(a, b)) <= 1e-2


def test_all_reduce_is_the_same_on_every_rank():
    case, mesh = Case(ALL_REDUCE, 300, 1032, 1032, odd=1), mesh_of()
    x, w = gaussians(case, team_size(mesh), 1)
    y = program(case, mesh, strategy="signal", config=MANY)(*placed(case, mesh, x, w))
    first, *others = copies(y)
    assert len(others) == team_size(mesh) - 1
    for other in others:
        np.testing.assert_array_equal(other.view(np.uint16), first.view(np.uint16))


def test_not_jitted():
    case, mesh = Case(REDUCE_SCATTER, 136, 264, 200), mesh_of()
    x, w = integers(case, team_size(mesh), 3)
    eager = spread(case, mesh, per_shard(case, strategy="signal"))
    assert_equal(case, eager(*placed(case, mesh, x, w)), exact_product(case, team_size(mesh), x, w))


@pytest.mark.parametrize("nccl_p2p", [True, False], ids=["", "NCCL_P2P_DISABLE"])
def test_without_peer_access(nccl_p2p):
    """As on GPUs whose memory peers can't reach: by our own check, and by NCCL's."""
    finish(start("no_peer_access", ENTWINE_PEER_ACCESS="0", **({} if nccl_p2p else {"NCCL_P2P_DISABLE": "1"})))


def test_one_process_a_gpu():
    each = lockstep.environments(len(jax.devices()))
    finish(*(start("distributed", "signal", **environment) for environment in each))


def test_among_graphs(tmp_path):
    """XLA captures what it may, down to the smallest graphs: these calls stay outside, between them."""
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*body.*"
    finish(start("chained", 20, "signal", XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS['on']} {dump}"))
    dumped = [path for path in tmp_path.glob("*thunk_sequence*") if "after_thunk_passes" in path.name]
    lines = [line for path in dumped for line in path.read_text(errors="replace").splitlines()]
    calls = [line for line in lines if "kCustomCall" in line]
    # What a command buffer holds is indented.
    assert any(not line.startswith(" ") for line in calls), "\n".join(lines)
