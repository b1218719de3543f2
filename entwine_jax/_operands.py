"""Operands of the primitive, of one product or of several: in its order, and by what they are."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ._strategy import Request


class Operands(NamedTuple):
    """Arrays, or types, or anything else that there is one of for each operand. `Request` says which there are."""

    xs: tuple[Any, ...]  # one of all-gather
    ws: tuple[Any, ...]
    biases: tuple[Any, ...]  # of each result, None where it has none
    scale: Any = None  # of float8: a number, or one for each of several products of an all-gather
    z: Any = None  # what reduce-scatter gathers beside

    def pairs(self) -> tuple[tuple[Any, Any], ...]:
        """x and w of each product."""
        return pairs(self.xs, self.ws)

    def flat(self) -> list[Any]:
        """As `collective_matmul_p` and the custom calls have them."""
        first, *others = self.pairs()
        more = [v for x, w in others for v in ((w,) if len(self.xs) == 1 else (x, w))]
        return [*first, *more, *(v for v in (*self.biases, self.scale, self.z) if v is not None)]


def pairs(xs: Sequence[Any], ws: Sequence[Any]) -> tuple[tuple[Any, Any], ...]:
    """x and w of each product; several w may have one x."""
    return tuple(zip(xs if len(xs) == len(ws) else [*xs] * len(ws), ws, strict=True))


def split(request: Request, flat: Iterable[Any]) -> Operands:
    """What `Operands.flat` has joined. No operand may be None."""
    x, w, *rest = flat
    xs, ws = [x], [w]
    for _ in range(request.products - 1):
        if request.op != "all_gather_matmul":
            xs.append(rest.pop(0))
        ws.append(rest.pop(0))
    biases = [rest.pop(0) if biased else None for biased in request.biases]
    scale = rest.pop(0) if request.scaled else None
    return Operands((*xs,), (*ws,), (*biases,), scale, rest.pop(0) if rest else None)
