"""The command `entwine`: one file for each of its subcommands.

Exit status: 0; 1 if what was asked is not so, or can't be done here; 2 if it was asked in a wrong way.
"""

import argparse
import sys
from collections.abc import Sequence

from . import _bench, _doctor, _explain, _predict, _trace, _tune
from ._usage import UsageError

_SUBCOMMANDS = (_doctor, _explain, _predict, _tune, _trace, _bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="entwine", description="entwine_jax on the command line.")
    commands = parser.add_subparsers(dest="command", required=True)
    for each in _SUBCOMMANDS:
        each.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except UsageError as error:
        print(f"entwine {options.command}: {error}", file=sys.stderr)
        return 2
    return status
