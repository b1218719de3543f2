"""The bar on a terminal, and lines elsewhere."""

import io

from entwine_jax._progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_a_bar():
    out = Terminal()
    with Progress(2, out=out) as bar:
        bar.show(0.5, "a long text")
        bar.finish(1, "short")
        bar.finish(2, "end")
    first, second, third = out.getvalue().removesuffix("\n").split("\r")[1:]
    assert first.startswith("[######..................]") and first.endswith("a long text")
    # What was longer is written over.
    assert (
        second.startswith("[############............]")
        and len(second) == len(first)
        and second.rstrip().endswith("short")
    )
    assert third.startswith("[########################]") and out.getvalue().endswith("\n")


def test_elsewhere_there_are_lines_or_nothing():
    for lines, wanted in ((True, "[1/2] a\n"), (False, "")):
        out = io.StringIO()
        with Progress(2, lines=lines, out=out) as bar:
            bar.show(0.5, "half")
            bar.finish(1, "a")
        assert out.getvalue() == wanted
