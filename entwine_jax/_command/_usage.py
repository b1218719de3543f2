"""What the subcommands share: their parsers, their errors, their tables."""

import argparse
from collections.abc import Sequence
from typing import Any


class UsageError(ValueError):
    """What was asked makes no sense: exit status 2."""


def subcommand(commands: Any, name: str, run: Any, what: str, *examples: str) -> argparse.ArgumentParser:
    """A parser with --json, whose help ends with examples."""
    lines = "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=f"example:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)
    return parser


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first row is the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
