"""The parts of `bench/gpu_drill.py`: measurements and checks that need a GPU. Each part runs in its own process.

A part is a function `part(gpu) -> PartResult`, listed in `gpu_drill.SHOWS`. With `gpu=False` it runs only the steps
that need no GPU, and notes the skipped ones. `wheels` installs the packages that the machine lacks.
"""
