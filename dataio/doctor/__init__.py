"""`headrace doctor`: looks at this node, its daemon and a store, and says in plain words what to change.

- `machine`: reads the node. It returns None for what cannot be read, and decides nothing
- `findings`: what a check returns, and the rule for the exit code
- `node`: the checks of memory, limits, the kernel, file systems and the clock
- `software`: the checks of versions, the GPU's libraries and the daemon
- `store`: the checks of a store
- `cli`: the command, which runs the checks with a time limit and prints the report

A new check is one function in `node.CHECKS` or `software.CHECKS`. It takes a `Machine` and returns one `Finding`, or
several.
"""
