"""From the trainer's tensors to bytes that no longer change: the arena, and the ways into it.

* `arena`: one memfd, allocated once, reused, touched ahead of its first use.
* `copies`: by how many threads, and what `headrace doctor --memory` says of this machine's copies.
* `copying`: one state being copied; at once, or behind the next forward and backward pass (*lazy*).
* `governed`: which tensors may be copied late, because only an optimizer's step changes them; and the hooks before that step.
* `slices`: a state larger than the memory for it, copied a slice at a time as the carrier takes the slices away.

Invariant: what is carried is the state as it was when `save` was called, to the bit, or the save fails.
Failure behaviour: that of each module.
"""
