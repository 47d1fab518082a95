"""The order of samples: which samples make the t-th global batch. This package does not import torch.

Start with `order` (the order of one dataset) and `schedule`. The other modules build on them, and `plan` connects the
computed order with the index. Everything here is a function of a description and a position. So seeking costs no more
than continuing, and ranks need not communicate.
"""
