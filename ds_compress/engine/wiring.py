"""Connect the channels of a stage: which rank each one goes to, over which process group."""

import itertools
from typing import Any

import torch

from ds_compress.config import DIRECTIONS, Config
from ds_compress.engine.intercept import ShapeLinks
from ds_compress.engine.stage import Instruction, Stage
from ds_compress.message.channel import Channel
from ds_compress.transport.p2p import (
    EagerReceiver,
    EagerSender,
    PeerTimeout,
    Receiver,
    Sender,
    channel_groups,
)
from ds_compress.transport.staging import receives_hold_device
from ds_compress.transport.streams import CodecStream, codec_stream_for

SHAPES, EXTRA = " shapes", " extra"


def wire(stage: Stage, engine: Any, depth: int) -> None:
    """Connect the channels of `stage` with the neighbours of `engine`, by links for schedules of `depth`.

    Every rank of the job calls it. On an eager link no order between the channels of a rank is left to break:
    see `channel_groups`.
    """
    config = stage.config
    seconds = config.block.link.timeout_s
    eager = config.block.link.mode == "eager"
    with_extra = [direction for direction in DIRECTIONS if config.in_force.has_extra_payload(direction)]
    extra = [f"{direction}{EXTRA}" for direction in with_extra]
    # NCCL's receive of a shape would hold the device
    shapes = [f"forward{SHAPES}"] if engine.dynamic_shape and not receives_hold_device(engine.device) else []
    cuts, groups = engine.num_stages - 1, {}
    if eager:
        connections = _connections(config, engine.device)
        groups = channel_groups(cuts, [*DIRECTIONS, *extra], seconds, connections)
        groups |= channel_groups(cuts, shapes, seconds)
    stage.groups = list(itertools.chain(*groups.values()))
    stage.extra_groups = set(with_extra)

    def link(kind: type[Any], channel: Channel, neighbour: int, use: str = "") -> Any:
        own = groups.get((channel.boundary.number % 2, f"{channel.direction}{use}"), (None,))
        timeout = PeerTimeout(channel.place, seconds)
        return kind(engine.grid.stage_to_global(neighbour), engine.device, own, timeout, depth)

    if eager and shapes:
        after, before = stage.after, stage.before
        stage.shape_links = ShapeLinks(
            link(EagerSender, after.forward, engine.next_stage, SHAPES) if after else None,
            link(EagerReceiver, before.forward, engine.prev_stage, SHAPES) if before else None,
        )
    sender, receiver = (EagerSender, EagerReceiver) if eager else (Sender, Receiver)
    ends = (
        (stage.before, engine.prev_stage, Instruction.RECV_ACTIVATION, Instruction.SEND_GRAD),
        (stage.after, engine.next_stage, Instruction.RECV_GRAD, Instruction.SEND_ACTIVATION),
    )
    for boundary, neighbour, receives, sends in ends:
        if boundary is None:
            continue
        codec_stream = codec_stream_for(engine.device) if eager else CodecStream()
        come, go = boundary.channels if boundary is stage.before else boundary.channels[::-1]
        for instruction, channel, kind in ((receives, come, receiver), (sends, go, sender)):
            links = link(kind, channel, neighbour), link(kind, channel, neighbour, EXTRA)
            stage.connect(instruction, channel, links, codec_stream)


def wire_extra_links(stage: Stage, stages: int) -> None:
    """Give extra packets groups of their own where codecs send them that did not when the stage was wired;
    every rank of the job calls it. `stages`: of the pipeline.
    """
    config = stage.config
    if config.block.link.mode != "eager" or not stage.ends:  # of one stage there are none
        return
    missing = [d for d in DIRECTIONS if config.in_force.has_extra_payload(d) and d not in stage.extra_groups]
    uses = [f"{direction}{EXTRA}" for direction in missing]
    connections = _connections(config, stage.ends[0].link.device)
    groups = channel_groups(stages - 1, uses, config.block.link.timeout_s, connections)
    stage.groups += itertools.chain(*groups.values())
    stage.extra_groups.update(missing)
    for end in stage.ends:
        link, channel = end.link, end.channel
        if channel.direction in missing:
            own = groups[channel.boundary.number % 2, f"{channel.direction}{EXTRA}"]
            end.extra_link = type(link)(link.peer, link.device, own, link.timeout, link.depth)


def _connections(config: Config, device: torch.device) -> int:
    """Return over how many connections a channel sends; over NCCL, one: it opens its own."""
    return 1 if receives_hold_device(device) else config.block.link.connections
