"""`python -m headrace` is the `headrace` command."""

import sys

from headrace.dataio.cli import main

if __name__ == "__main__":
    sys.exit(main())
