"""One answer in all processes of a program."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def agreed(value: Any) -> Any:
    """Process 0's value, of what JSON can hold. With several processes a collective: all must call it, in one order."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    if jax.process_index() != 0:
        text = np.zeros(length, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text)).astype(np.uint8).tobytes())
