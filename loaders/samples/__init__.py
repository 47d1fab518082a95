"""One place of the order to one finished sample: read, check, decode, and stand in for what is damaged."""
