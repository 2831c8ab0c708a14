"""The experiments of arXiv 2401.07788, reproduced and extended: see `launch/reproduce.py`."""
