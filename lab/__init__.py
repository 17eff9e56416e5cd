"""The laboratory: grids of runs as data, and what is measured across them. Run from a clone: `python -m lab`."""
