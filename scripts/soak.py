"""Launches random collective matmuls by the thousand and checks every result to the bit.

On the GPUs where there are two, else on 8 virtual CPU devices. Launches happen in a child process, so that a crash or a
hang is a line in the report and not its end. Results go to --out as JSON; the exit status tells whether all was well.

    python scripts/soak.py --seconds 60 --out soak.json
    python scripts/soak.py --replay 17                       the round of seed 17 alone
    python scripts/soak.py --leaks                           what 10,000 calls and 200 compilations leave in memory
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from soak.supervisor import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve(), __doc__))
