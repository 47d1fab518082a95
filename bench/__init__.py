"""Floor 4: the demo and the benchmarks. May import everything below; nothing imports it."""
