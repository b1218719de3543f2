"""Benchmarks of entwine_jax; see collective_matmul.py and report.py."""
