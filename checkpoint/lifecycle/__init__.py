"""What becomes of old steps: which are kept, how the others are removed, and names that people give to steps.

* `keep`: the policy `Keep`, and which steps it lets go. Pure.
* `inventory`: one look at the whole repository.
* `plan`: what a collection would do with what was seen. Pure, printable.
* `collect`: the collection itself, step by step, in the one order that is safe beside savers and other collectors.
* `tags`: names for steps.

Invariant: no byte that a committed or leased step needs is ever removed (`docs/design/0012-retention.md`).
Failure behaviour: that of each module; a collection that dies anywhere leaves a repository that is whole, and the next one
finishes its work.
"""
