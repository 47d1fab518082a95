"""Publishes the weights of committed steps under a name, and applies new versions to tensors in use."""
