"""Compressed exchange of gradients and parameters between the data-parallel replicas of a stage."""
