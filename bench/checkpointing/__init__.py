"""What `headrace bench checkpoint` measures, in each candidate's own process (`__main__`).

`training` makes a state by really training, with one rank or several; `entries` lists the candidates, which `ours`, `peers` and
`floor` build; `measure` saves and restores; `places` is what lies beneath: bytes, page cache.
"""
