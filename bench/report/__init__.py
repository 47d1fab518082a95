"""What people read: `headrace bench report` (one page, or Markdown) and `headrace bench compare` (what changed beyond noise).

`charts` draws (SVG, pure), `views` chooses what a part is shown as, `page` and `markdown` put it together, `compare`
judges, `cli` holds the two commands.
"""
