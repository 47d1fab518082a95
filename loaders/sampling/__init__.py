"""Which samples make the t-th global batch: arithmetic, and the plan that joins it with the index. No torch.

Start with `order` (the order of one dataset) and `schedule`; the others build on them. Everything here is a function of
a description and a position. So seeking costs no more than going on, and ranks need not tell each other anything.
"""
