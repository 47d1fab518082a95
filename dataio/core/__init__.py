"""The lowest layer: errors, limits, clocks, logging, metrics, tracing, files and the toolkit for commands.

It imports no other package of Headrace.
"""
