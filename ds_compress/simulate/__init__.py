"""The channels of a pipeline inside one process: for one GPU, a notebook, or to compare with a pipeline.

Each boundary becomes a step between two layers that packs what crosses it, and what its gradient sends back,
with the objects that the pipeline engine uses: the losses are those of the real pipeline. A weight that two
stages share is one here, with exact gradients, whatever the key "tied" says.
"""

from ds_compress.simulate.model import Traffic, announce, evaluating, simulate, traffic
from ds_compress.simulate.replicas import SimulatedReplicas

__all__ = ["SimulatedReplicas", "Traffic", "announce", "evaluating", "simulate", "traffic"]
