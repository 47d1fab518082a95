"""The libraries that Headrace is compared with: how each does the same work."""
