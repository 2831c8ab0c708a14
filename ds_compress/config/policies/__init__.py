"""Policies: which settings the codecs use at which step. One policy per file."""

from ds_compress.config.policies import accordion  # noqa: F401  (registers it)
from ds_compress.config.policies.base import POLICIES, ChannelKey, Constant, DecisionInput, Policy, Signal
from ds_compress.config.policies.ladder import ladders

__all__ = ["POLICIES", "ChannelKey", "Constant", "DecisionInput", "Policy", "Signal", "ladders"]
