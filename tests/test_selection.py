"""Which op shardings select: the pure rules, for all shardings of small meshes."""

import itertools

import pytest

from entwine_jax import _selection
from entwine_jax._selection import OPERANDS

SIZES = {"d": 2, "t": 4}
SHAPES = {"x": (8, 16, 24), "w": (24, 32), "y": (8, 16, 32)}
PLACES = [(), ("d",), ("t",), ("d", "t")]


def every_spec(ndim):
    for spec in itertools.product(PLACES, repeat=ndim):
        axes = [axis for dim in spec for axis in dim]
        if len(set(axes)) == len(axes):
            yield spec


def sliced(before, after):
    """Whether slices turn every one of `before` into that of `after`."""
    return all(
        new[: len(old)] == old for a, b in zip(before, after, strict=True) for old, new in zip(a, b, strict=True)
    )


def layouts(product):
    a, b = OPERANDS[product]
    shapes = [SHAPES[name] for name in (a, b, product)]
    for specs in itertools.product(*(every_spec(len(shape)) for shape in shapes)):
        yield specs, _selection.select(product, *specs, shapes, SIZES)


@pytest.mark.parametrize("product", ["y", "x", "w"])
def test_every_layout_is_a_matmul(product):
    """Of each operand and the result, an axis shards one dimension; a dimension is sharded alike wherever it occurs."""
    ops = set()
    for (a, b, result), layout in layouts(product):
        ops.add(layout.op)
        for spec in (*layout.operands, layout.result):
            axes = [axis for dim in spec for axis in dim]
            assert len(set(axes)) == len(axes)
        if layout.op != "dot":
            assert layout.result == result and not layout.summed and not layout.moves and layout.team
            assert sliced((a, b), layout.operands)
            continue
        named = dict(zip((*OPERANDS[product], product), (*layout.operands, layout.result), strict=True))
        assert (
            named["x"][:-1] == named["y"][:-1] and named["x"][-1] == named["w"][0] and named["y"][-1] == named["w"][1]
        )
        contracted = {"y": named["x"][-1:], "x": named["y"][-1:], "w": named["x"][:-1]}[product]
        assert set(layout.summed) == {axis for axes in contracted for axis in axes}
        assert layout.moves or sliced((a, b, layout.result), (*layout.operands, result))
    collective = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}
    assert ops == ({"dot"} if product == "w" else {"dot"} | collective)


def test_table():
    """The table of collective_matmul's documentation, data axes passing through."""
    expected = {
        "all_gather_matmul": ((("d",), ("t",), ()), ((), ("t",)), (("d",), (), ("t",))),
        "matmul_reduce_scatter": ((("d",), (), ("t",)), (("t",), ()), (("d",), ("t",), ())),
        "matmul_all_reduce": ((("d",), (), ("t",)), (("t",), ()), (("d",), (), ())),
    }
    for op, (x, w, y) in expected.items():
        shapes = [SHAPES[name] for name in "xwy"]
        assert _selection.select("y", x, w, y, shapes, SIZES).op == op
        assert _selection.select("y", x, w, y, shapes, SIZES, ("t",)).op == op
        assert _selection.select("y", x, w, y, shapes, SIZES, ("d",)).op == "dot"


def test_gradients_of_the_table():
    """dx of an all-gather is a reduce-scatter and the other way round; dx of an all-reduce moves nothing."""
    shapes = [SHAPES[name] for name in "ywx"]
    for x, w, y, op in (
        (((), ("t",), ()), ((), ("t",)), ((), (), ("t",)), "matmul_reduce_scatter"),
        (((), (), ("t",)), (("t",), ()), ((), ("t",), ()), "all_gather_matmul"),
        (((), (), ("t",)), (("t",), ()), ((), (), ()), "dot"),
    ):
        layout = _selection.select("x", y, w, x, shapes, SIZES)
        assert layout.op == op and not layout.moves


def test_an_unsharded_operand_is_sliced():
    """That costs nothing, and is what a cotangent needs that was made whole."""
    shapes = [SHAPES[name] for name in "xwy"]
    whole_x, whole_w = ((), (), ()), ((), ())
    for x, w, y, op in (
        (whole_x, (("t",), ()), (("d",), ("t",), ()), "matmul_reduce_scatter"),
        ((("d",), (), ("t",)), whole_w, (("d",), (), ()), "matmul_all_reduce"),
        (((), ("t",), ()), whole_w, ((), (), ("t",)), "all_gather_matmul"),
        (whole_x, whole_w, (("d",), ("t",), ()), "dot"),
    ):
        layout = _selection.select("y", x, w, y, shapes, SIZES)
        assert layout.op == op and not layout.moves


def test_sizes():
    """Axes of size one shard nothing; what doesn't divide isn't sharded while the product is taken."""
    assert _selection.of_dims([("one", "t"), None, "one"], 4, {"one": 1, "t": 4}) == (("t",), (), (), ())
    layout = _selection.select("y", ((), ("t",)), (("t",), ()), ((), ()), [(8, 6), (6, 8), (8, 8)], SIZES)
    assert (layout.op, layout.summed, layout.operands) == ("dot", (), (((), ()), ((), ())))
    assert layout.moves and "divide" in layout.reason
