"""Reproduce and extend the experiments of arXiv 2401.07788; see `launch/reproduce.py`."""
