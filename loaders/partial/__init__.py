"""Reading of long files only what clips and windows need (design note 0022).

Start with `needed` (which pieces that is); `file` reads them, and whatever else a decoder looks at. `boxes` is MP4's tables.
"""
