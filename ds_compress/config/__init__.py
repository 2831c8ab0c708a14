"""The "ds_compress" block of ds_config.json: what may be written, and what it means for each boundary."""

from ds_compress.config.block import DIRECTIONS, KEY, Block
from ds_compress.config.codec_settings import BoundaryCodecs
from ds_compress.config.config import Config
from ds_compress.config.replicas import ReplicasOptions

__all__ = ["DIRECTIONS", "KEY", "Block", "BoundaryCodecs", "Config", "ReplicasOptions"]
