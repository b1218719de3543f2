"""collective_matmul under JAX's transformations, in each mode; export and the persistent compilation cache."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, collectives, operands, plain_mlp, setup
from helpers import assert_close, normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import entwine_jax


def square_sum(f):
    return lambda *args: jnp.sum(jnp.square(f(*args)))


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [None, "names"])
def test_scan_and_remat(mode, policy):
    """Layers in a scan, rematerialised; what is gathered or scattered may be saved by name."""
    x, ups, downs = normal((4, 8, 12), 1), normal((3, 12, 16), 2) / 4, normal((3, 16, 12), 3) / 4

    def stack(layer):
        def body(x, weights):
            return checkpoint_name(layer(checkpoint_name(x, "x"), *weights), "y"), None

        policy_ = jax.checkpoint_policies.save_only_these_names("x", "y") if policy else None
        return lambda x, ups, downs: lax.scan(jax.checkpoint(body, policy=policy_), x, (ups, downs))[0]

    wanted = jax.value_and_grad(square_sum(stack(plain_mlp)), (0, 1, 2))(x, ups, downs)
    with setup(mode) as s:
        specs = s.specs[0], P(None, None, "t"), P(None, "t", None)
        f = s.spread(stack(s.mlp), specs, s.specs[0])
        args = s.place(x, ups, downs, specs=specs)
        compiled = jax.jit(jax.value_and_grad(square_sum(f), (0, 1, 2))).lower(*args).compile()
        got = compiled(*args)
        found = collectives(compiled.as_text())
    assert_close(got, wanted)
    # One forward layer, one backward with its rematerialised forward; dW's rows are gathered beside.
    assert not {"all-gather", "reduce-scatter", "collective-permute", "all-to-all"} & found.keys()
    assert found["entwine_all_gather_matmul"] == 3 and found["entwine_matmul_reduce_scatter"] == 2


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", ["x", "w", "both"])
def test_vmap(mode, batched):
    x, w = normal((3, 4, 8, 12), 1), normal((3, 12, 16), 2)
    x_dim, w_dim = None if batched == "w" else 0, None if batched == "x" else 0
    x, w = x if x_dim == 0 else x[0], w if w_dim == 0 else w[0]
    wanted = jax.value_and_grad(square_sum(jax.vmap(jnp.matmul, (x_dim, w_dim))), (0, 1))(x, w)
    with setup(mode) as s:

        def spec(dim, spec):
            return spec if dim is None else P(None, *spec)

        specs = spec(x_dim, s.specs[0]), spec(w_dim, s.specs[1])
        f = s.spread(jax.vmap(s.up, (x_dim, w_dim)), specs, P(None, *s.specs[3]))
        args = s.place(x, w, specs=specs)
        got = jax.jit(jax.value_and_grad(square_sum(f), (0, 1)))(*args)
        # A batch of x is one call; batches of w are one after the other, in a loop.
        assert collectives(jax.jit(f).lower(*args).compile().as_text()) == {"entwine_all_gather_matmul": 1}
    assert_close(got, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_donation(mode):
    wanted = np.asarray(plain_mlp(*operands()))
    with setup(mode) as s:
        x, *weights = s.place(*operands())
        y = jax.jit(s.spread(s.mlp), donate_argnums=0)(x, *weights)
        assert x.is_deleted()
    assert_close(y, wanted)


@pytest.mark.parametrize("mode", ["explicit", "manual", "partial"])
def test_export(mode):
    wanted = np.asarray(plain_mlp(*operands()))
    with setup(mode) as s:
        args = s.place(*operands())
        checks = [
            jax.export.DisabledSafetyCheck.custom_call(f"entwine_{op}")
            for op in ("all_gather_matmul", "matmul_reduce_scatter")
        ]
        exported = jax.export.export(jax.jit(s.spread(s.mlp)), disabled_checks=checks)(*args)
        assert_close(np.asarray(jax.jit(exported.call)(*args)), wanted)


def test_export_under_automatic_sharding():
    """custom_partitioning calls back into this process: JAX refuses, as docs/sharp_bits.md says."""
    with setup("auto") as s, pytest.raises((ValueError, NotImplementedError)):
        jax.export.export(jax.jit(s.mlp))(*s.place(*operands()))


CACHED = """
import jax, sys
sys.path.insert(0, sys.argv[2])
from global_view import *
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
for mode in MODES:
    with setup(mode) as s:
        lowered = jax.jit(s.spread(s.mlp)).lower(*s.place(*operands()))
        events.clear()
        lowered.compile()
        print(mode, "/jax/compilation_cache/cache_hits" in events)
"""


def test_persistent_cache(tmp_path):
    """In a second process, hits wherever JAX knows the shardings while it traces."""
    for again in (False, True):
        command = [sys.executable, "-c", CACHED, str(tmp_path), str(Path(__file__).parent)]
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        hits = dict(line.split() for line in done.stdout.splitlines())
        assert hits == {mode: str(again and mode != "auto") for mode in MODES}


def test_explain_sees_through_transformations():
    with setup("auto") as s:
        args = s.place(*operands())
        found = entwine_jax.explain(jax.grad(square_sum(jax.checkpoint(s.mlp)), (0, 1, 2)), *args)
        assert sorted(m.op for m in found) == ["all_gather_matmul"] * 3 + ["matmul_reduce_scatter"] * 2
        assert all(m.strategy == "fused" and m.plan is not None and m.team_size == 4 for m in found)
        assert [m.transpose_w for m in found].count(True) == 2
        lines = repr(entwine_jax.explain(s.mlp, *args)).splitlines()
        assert len(lines) == 3 and "t:4" in lines[1]
