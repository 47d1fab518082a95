"""The parts of `bench/gpu_drill.py`: what only a GPU can show, one part a module, each in a process of its own.

A part has `LINE` (what it shows) and `run(gpu) -> PartResult`; with `gpu=False` it does what a machine without one can
do, and says what it left out. `wheels` brings the packages that the machine lacks.
"""
