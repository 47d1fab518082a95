"""The code that all benchmarks share: results documents, measurement, statistics, and the command of a benchmark."""
