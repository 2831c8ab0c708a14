"""The links of a stage: which rank each channel goes to, over which process group."""

from typing import Any

from ds_compress.config import DIRECTIONS
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
    extra = [f"{direction}{EXTRA}" for direction in DIRECTIONS if config.has_extra_payload(direction)]
    # NCCL's receive of a shape would hold the device
    shapes = [f"forward{SHAPES}"] if engine.dynamic_shape and not receives_hold_device(engine.device) else []
    groups = channel_groups(engine.num_stages - 1, [*DIRECTIONS, *extra, *shapes], seconds) if eager else {}
    stage.groups = list(groups.values())
    stage.extra_groups = {direction for direction in DIRECTIONS if config.has_extra_payload(direction)}

    def link(kind: type[Any], channel: Channel, neighbour: int, use: str = "") -> Any:
        group = groups.get((channel.boundary.number % 2, f"{channel.direction}{use}"))
        timeout = PeerTimeout(channel.place, seconds)
        return kind(engine.grid.stage_to_global(neighbour), engine.device, group, timeout, depth)

    def send(instruction: Instruction, channel: Channel, neighbour: int, codec_stream: CodecStream) -> None:
        kind = EagerSender if eager else Sender
        ends = link(kind, channel, neighbour), link(kind, channel, neighbour, EXTRA)
        stage.connect_sender(instruction, channel, *ends, codec_stream)

    def receive(
        instruction: Instruction, channel: Channel, neighbour: int, codec_stream: CodecStream
    ) -> None:
        kind = EagerReceiver if eager else Receiver
        ends = link(kind, channel, neighbour), link(kind, channel, neighbour, EXTRA)
        stage.connect_receiver(instruction, channel, *ends, codec_stream)

    if eager and shapes:
        after, before = stage.after, stage.before
        stage.shape_links = ShapeLinks(
            link(EagerSender, after.forward, engine.next_stage, SHAPES) if after else None,
            link(EagerReceiver, before.forward, engine.prev_stage, SHAPES) if before else None,
        )
    if stage.before:
        codec_stream = codec_stream_for(engine.device) if eager else CodecStream()
        receive(Instruction.RECV_ACTIVATION, stage.before.forward, engine.prev_stage, codec_stream)
        send(Instruction.SEND_GRAD, stage.before.backward, engine.prev_stage, codec_stream)
    if stage.after:
        codec_stream = codec_stream_for(engine.device) if eager else CodecStream()
        send(Instruction.SEND_ACTIVATION, stage.after.forward, engine.next_stage, codec_stream)
        receive(Instruction.RECV_GRAD, stage.after.backward, engine.next_stage, codec_stream)


def wire_extra_links(stage: Stage, engine: Any) -> None:
    """Give extra packets groups of their own where codecs send them that did not when the stage was wired;
    every rank of the job calls it.
    """
    config = stage.config
    if config.block.link.mode != "eager":
        return
    missing = [d for d in DIRECTIONS if config.has_extra_payload(d) and d not in stage.extra_groups]
    uses = [f"{direction}{EXTRA}" for direction in missing]
    groups = channel_groups(engine.num_stages - 1, uses, config.block.link.timeout_s)
    stage.groups += groups.values()
    stage.extra_groups.update(missing)
    for end in stage.ends:
        link, channel = end.link, end.channel
        if channel.direction in missing:
            group = groups[channel.boundary.number % 2, f"{channel.direction}{EXTRA}"]
            end.extra_link = type(link)(link.peer, link.device, group, link.timeout, link.depth)
