"""The grounds of a choice where options say the compute times and what crosses; codecs are measured on a
message like the benchmark's."""

import argparse
from collections.abc import Iterator
from functools import partial

from ds_compress.cli.advise import files
from ds_compress.cli.advise.codecs import codec_seconds, size_and_loss
from ds_compress.cli.advise.grounds import Grounds, given_workload, rooms, stock
from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.check import UNCOMPRESSED, message_sizes
from ds_compress.codec import TensorSpec
from ds_compress.codecs.mixins import VariableSizePayload
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.quality import Limits
from ds_compress.errors import CompressionError
from ds_compress.planning import choice, offers
from ds_compress.planning.choice import Candidate, Message, Setting
from ds_compress.planning.step_time import Network, Traffic


class Given:
    """What options say."""

    def __init__(self, args: argparse.Namespace):
        """
        Raises:
            CompressionError: one is missing, or not as it should be.
        """
        workload = given_workload(args)
        for option, value in (("--forward-ms", workload), ("--shape", args.shape)):
            if value is None:
                raise CompressionError(
                    f"{option}: missing; give it, or --model or --probe to have it measured"
                )
        assert workload is not None
        self._args, self._workload = args, workload
        self._files = files.read(args.recipe or ())
        dtype = args.dtype or "fp32"
        self._spec = TensorSpec(args.shape, DTYPES[dtype])
        self._message = f"{list(args.shape)} {dtype}"

    def grounds(self, network: Network, limits: Limits) -> Grounds:
        """`limits`: of the errors within which settings are mixed."""
        raw = (self._spec.nbytes,) * (self._args.stages - 1)
        found = self._of_files() if self._files else self._offered(network, limits)
        return Grounds(self._workload, [stock(raw, raw), *found], self._message)

    def _offered(self, network: Network, limits: Limits) -> list[Candidate]:
        settings = []
        for offer in offers.offered():
            config = Config(offer.block)
            codecs = config.codecs(None)
            if not any(getattr(codecs, direction).refuses(self._spec) for direction in DIRECTIONS):
                messages = (self._message_of(config, direction) for direction in DIRECTIONS)
                settings.append(Setting(offer, *messages))
        boundaries = self._args.stages - 1
        link = {"eager": True, "depth": self._args.depth, "rooms": rooms(self._args, self._held)}
        return choice.candidates([settings] * boundaries, [network] * boundaries, limits, **link)

    @property
    def _held(self) -> list[float]:
        """Bytes by stage: its input, as with activation checkpointing."""
        return [float(self._spec.nbytes)] * self._args.stages

    def _of_files(self) -> Iterator[Candidate]:
        def messages(name: str, config: Config) -> files.Messages:
            forward, backward = (self._message_of(config, direction) for direction in DIRECTIONS)
            count = self._args.stages - 1
            return [forward] * count, [backward] * count

        return files.candidates(self._files, messages, partial(rooms, self._args, self._held))

    def _message_of(self, config: Config, direction: str) -> Message:
        """The messages of `direction`, at every boundary.

        Raises:
            CompressionError: those of different boundaries differ.
        """
        args, spec = self._args, self._spec
        stages = args.stages if config.block.boundaries else 2
        row, *others = [row for row in message_sizes(config, stages, spec) if row["direction"] == direction]
        if any(other["codec"] != row["codec"] for other in others):
            raise CompressionError(
                f"{KEY}.boundaries: gives boundaries codecs of their own {direction}, but a step is "
                "predicted with the same at all of them; leave it out"
            )
        if row["codec"] in UNCOMPRESSED:
            return Message(Traffic(row["wire_bytes"]), 0.0)
        codec = getattr(config.codecs(0), direction)
        if args.codec_gbps:
            encode = decode = spec.nbytes / (args.codec_gbps * 1e9)
        else:
            encode, decode = codec_seconds(codec, spec, str(args.device))
        bits, error = size_and_loss(codec, spec, args.device)
        # What such a message takes at most says little where its size follows from the data
        nbytes = int(bits * spec.numel / 8) if isinstance(codec, VariableSizePayload) else row["wire_bytes"]
        return Message(Traffic(nbytes, encode, decode), error)
