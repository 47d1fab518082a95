"""What all benchmarks share: the results document, side-by-side measurement, statistics, the shell around a benchmark."""
