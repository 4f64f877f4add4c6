"""Who is timed against whom, and the gate of each: the command `bench` and benchmarks/ share it."""
