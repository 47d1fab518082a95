"""Workloads in the shape of MLPerf Storage's, unofficial: emulated accelerators, and checkpoints of large language models.

MLPerf is a trademark of the MLCommons Association. Nothing here is a submission, verified by MLCommons, or comparable
with published results. `workloads` holds the published numbers and where they are from, `data` makes samples,
`accelerator` is one emulated accelerator, `train` and `states` are the commands `headrace bench train` and `headrace
bench llm-checkpoint`.
"""
