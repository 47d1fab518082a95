"""Test support, also for other projects.

It has the conformance suite for stores, stores with faults, a fault proxy, S3 servers, faults of the operating system,
and a simulation in virtual time.
"""
