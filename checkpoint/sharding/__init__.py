"""Tensors that are spread over ranks: who writes which part of them, and which parts a rank needs to have its own again.

`placement` says what a DTensor's rank holds (the only module here that knows torch), `owners` who writes it, `cover` whether
shards make up their tensor, `regions` which bytes of a saved shard belong where in another one.

Invariant: everything is judged by the boxes that shards take up in the *global* tensor, never by meshes, so a step may be
restored onto any mesh, placement and number of ranks.
Failure behaviour: see the modules.
"""
