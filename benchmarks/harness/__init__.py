"""Shared parts of the benchmarks: clock, gates, rows, tables, charts, and the large contestants."""
