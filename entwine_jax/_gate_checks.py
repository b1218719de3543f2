"""Errors of the user of `all_gather_matmul(..., gated=True)`."""

from typing import Any

from ._float8_checks import FLOAT8


def weights(op: str, x: Any, w: Any, scales: Any) -> None:
    """That there are two weights, and no float8."""
    if not isinstance(w, tuple | list) or len(w) != 2:
        given = f"{len(w)} arrays" if isinstance(w, tuple | list) else f"one, {type(w).__name__}"
        raise ValueError(
            f"entwine_jax.{op}: gated=True multiplies the products of two weights, w=(w_gate, w_up), but w is {given}; "
            "pass two, or leave gated out"
        )
    if scales is not None or any(getattr(v, "dtype", None) in FLOAT8 for v in (x, *w)):
        raise NotImplementedError(
            f"entwine_jax.{op}: gated=True takes no float8 operands; leave it out and multiply activation(gate) by up"
        )


def activation(op: str, given: Any) -> str | None:
    if isinstance(given, tuple | list):
        raise ValueError(
            f"entwine_jax.{op}: with gated=True there is one activation, that of the first weight's product, not "
            f"activation={given!r}; pass its name, the weight that it belongs to first"
        )
    name: str | None = given
    return name


def columns(op: str, gate: int, up: int) -> None:
    if gate != up:
        raise TypeError(
            f"entwine_jax.{op}: w[0] has {gate} columns and w[1] {up}, but with gated=True their products are "
            "multiplied: they must have as many"
        )
