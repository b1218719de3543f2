"""``python -m entwine_jax`` is the command `entwine`."""

import sys

from ._command import main

sys.exit(main())
