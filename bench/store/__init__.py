"""`headrace bench store`: a store under load, by operation, object size and concurrency, beside other clients.

`cells` says what is measured (pure), `clients` how each client does it, `worker` measures one client in a process of its own,
`objects` writes what is read and takes it away again, `knee` finds where more concurrency stops paying, `cli` is the command.
"""
