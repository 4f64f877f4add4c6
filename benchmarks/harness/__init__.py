"""What the benchmarks share: clock, gates, rows, tables, charts, and the large contestants."""
