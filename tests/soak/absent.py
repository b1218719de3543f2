"""A rank whose program lacks a call that its peers make: an error in time that names what was waited for, no hang."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import entwine_jax
from soak.draw import OPS

BOUND_S, SLACK_S = 0.3, 10.0


def absent(seed: int) -> tuple[bool, float, str]:
    """Whether it was reported in time, after how many seconds, and how. For CPU devices, which are well after it."""
    rng = random.Random(seed)
    ranks, op = rng.randint(2, min(8, len(jax.devices()))), rng.choice(OPS)
    mesh, missing = Mesh(np.array(rng.sample(jax.devices(), ranks)), ("t",)), rng.randrange(ranks)
    options: dict[str, Any] = {"strategy": "fused", "config": entwine_jax.Config(timeout_s=BOUND_S)}

    def rank(x: jax.Array, w: jax.Array) -> jax.Array:
        def call() -> jax.Array:
            y: jax.Array = getattr(entwine_jax, op)(x, w, "t", **options)
            return y

        y = jax.eval_shape(call)
        done: jax.Array = lax.cond(lax.axis_index("t") == missing, lambda: jnp.zeros(y.shape, y.dtype), call)
        return done[None]

    x, w = jnp.ones((ranks * rng.randint(1, 60), 16)), jnp.ones((16, rng.randint(1, 90)))
    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=P(), out_specs=P("t"), check_vma=False))
    compiled = run.lower(x, w).compile()
    start = time.monotonic()
    try:
        compiled(x, w).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        seconds, message = time.monotonic() - start, str(error)
        words = rf"{op}: rank \d waited {BOUND_S} s for rank {missing} at tile \(row \d+, column \d+\) .* epoch \d+ "
        return bool(re.search(words, message)) and seconds < BOUND_S + SLACK_S, seconds, message
    return False, time.monotonic() - start, "no error"
