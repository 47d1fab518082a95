"""The libraries that Headrace is compared with: one function for each that does the same work."""
