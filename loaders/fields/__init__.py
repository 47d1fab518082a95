"""Fields: the entries of a batch, each of which is made from some files of a sample."""
