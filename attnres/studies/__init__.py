"""Grids of runs as data, and what is measured across them."""
