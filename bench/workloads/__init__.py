"""The workload of each benchmark: the data it reads or writes, our candidates, and the command itself."""
