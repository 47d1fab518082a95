"""Reports of results: `headrace bench report` (one page, or Markdown) and `headrace bench compare` (changes beyond
noise).

`charts` chooses and draws the SVG charts of a part, `page` makes the HTML, `compare` judges changes, and `cli` has the
two commands.
"""
