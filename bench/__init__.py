"""The demo and the benchmarks. They may import all other packages of Headrace; no other package imports them."""
