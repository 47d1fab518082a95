"""The last steps of a node's checkpoints, kept near: a directory (`shelf`), what may go (`retention`), and two wrappers of a
store: `keeping` for whoever writes, `near` for whoever reads. docs/design/0005 has the reasons."""
