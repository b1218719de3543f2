"""Precedence: argument, environment, default; and settings that reach the executor."""

import jax
import numpy as np
import pytest
from helpers import integers, mesh_of, product, spread

import entwine_jax
from entwine_jax import Config
from entwine_jax._config import resolve


def only(f, x, w):
    (matmul,) = entwine_jax.explain(f, x, w)
    return matmul


def op_of(strategy=None, config=None):
    def rank(op, x, w, axis):
        return getattr(entwine_jax, op)(x, w, axis, strategy=strategy, config=config)

    return spread(rank, "matmul_reduce_scatter", mesh_of((2,)))


def test_strategy_precedence(monkeypatch):
    x, w = integers((8, 8), 1), integers((8, 8), 2)
    assert only(op_of(), x, w).strategy == "xla"  # auto, on CPU devices
    monkeypatch.setenv("ENTWINE_STRATEGY", "fused")
    assert only(op_of(), x, w).strategy == "fused"
    assert only(op_of("auto"), x, w).strategy == "xla"
    assert only(op_of("xla"), x, w).strategy == "xla"


def test_plan_overrides():
    config = Config(lead=3, raster=2, transport="push", pushers=2, tile_m=16, tile_n=8)
    x, w = integers((40, 8), 1), integers((8, 24), 2)
    f = op_of("fused", config)
    plan = only(f, x, w).plan
    assert (plan.lead, plan.raster, plan.transport, plan.pushers, plan.tile_m, plan.tile_n) == (3, 2, "push", 2, 16, 8)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w)), product(x, w))


@pytest.mark.parametrize(
    "variable, text, field, default, value",
    [
        ("TIMEOUT_S", "1.5", "timeout_ms", 60_000, 1500),
        ("TIMEOUT_S", "0", "timeout_ms", 60_000, 0),
        ("WORKERS", "3", "workers", 1, 3),
        ("STALL_US", "20", "stall_us", 0, 20),
        ("STALL_SEED", "7", "stall_seed", 0, 7),
    ],
)
def test_settings(variable, text, field, default, value, monkeypatch):
    assert getattr(resolve("op", None, None), field) == default
    monkeypatch.setenv(f"ENTWINE_{variable}", text)
    assert getattr(resolve("op", None, None), field) == value
    config = Config(timeout_s=2, workers=2, stall_us=2, stall_seed=2)
    assert getattr(resolve("op", None, config), field) == (2000 if field == "timeout_ms" else 2)


def test_config_is_a_value():
    assert Config(lead=3) == Config(lead=3) and hash(Config(lead=3)) == hash(Config(lead=3))
    assert repr(Config(lead=3, transport="push")) == "Config(lead=3, transport='push')"
