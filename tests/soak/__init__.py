"""Random collective matmuls by the thousand, each result checked to the bit: scripts/soak.py."""
