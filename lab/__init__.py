"""The laboratory: studies, which are grids of runs as data and analyses of their measurements. Run from a clone:
`python -m lab`."""
