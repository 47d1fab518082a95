"""The parts of `bench/gpu_drill.py`: what only a GPU can show, each part in a process of its own.

A part is a function `part(gpu) -> PartResult`, listed in `gpu_drill.SHOWS`. With `gpu=False` it does what a machine without
a GPU can do, and notes what it left out. `wheels` installs the packages that the machine lacks.
"""
