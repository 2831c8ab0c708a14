"""Replicas that are launched apart, at sites behind slow links: they exchange weights every H steps."""

from ds_compress.sites.simulation import SimulatedRounds

__all__ = ["SimulatedRounds"]
