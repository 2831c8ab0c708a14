"""A pipeline with a pair of small layers at every cut: stages send coefficients in a learned basis.

Experimental; docs/subspace.md says what it costs.
"""

from ds_compress.engine.subspace.basis import find_bases
from ds_compress.engine.subspace.module import SubspacePipeline
from ds_compress.engine.subspace.pair import Basis, Narrow, PairLayer, Widen, insert_pairs

__all__ = ["Basis", "Narrow", "PairLayer", "SubspacePipeline", "Widen", "find_bases", "insert_pairs"]
