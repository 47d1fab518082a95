"""Test support that others can reuse: the store conformance suite, faulty stores, a fault proxy, S3 servers, system
faults.
"""
