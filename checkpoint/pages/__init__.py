"""The frame and the style of the HTML pages that commands write (`ckpt diff -o`, `ckpt report`)."""
