"""Gradients between data-parallel replicas of a stage, compressed."""
