"""Pipelines whose messages live in a learned subspace: a pair of small layers at every cut, trained with the
model. Experimental; docs/subspace.md has what it costs."""

from ds_compress.engine.subspace.basis import bases
from ds_compress.engine.subspace.module import SubspacePipeline
from ds_compress.engine.subspace.pair import Basis, Linear, Narrow, Widen, with_pairs

__all__ = ["Basis", "Linear", "Narrow", "SubspacePipeline", "Widen", "bases", "with_pairs"]
