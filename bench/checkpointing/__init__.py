"""What `millrace bench checkpoint` measures: `training` makes a state by really training, `candidates` save and restore it."""
