"""One page about a repository: runs, forks, sizes, failures, published names and metadata (docs/howto/report.md)."""
