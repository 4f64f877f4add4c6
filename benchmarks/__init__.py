"""Benchmarks: one file per family of ops, run by ``python -m benchmarks.run``."""
