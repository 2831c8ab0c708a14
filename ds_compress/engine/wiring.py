"""Connect the channels of a stage: which rank each one goes to, over which process group."""

import itertools
from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.pipe import schedule

from ds_compress.config import DIRECTIONS
from ds_compress.engine.deepspeed import PipelineEngine
from ds_compress.engine.intercept import ShapeLinks
from ds_compress.engine.stage import Stage
from ds_compress.message.channel import Channel
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.transport.codec_stream import CodecStream, codec_stream_for
from ds_compress.transport.connections import connect, require_files
from ds_compress.transport.p2p import ExchangeConnections, PeerTimeout, Receiver, Sender, channel_groups, meet
from ds_compress.transport.staging import receives_hold_device

SHAPES, EXTRA = " shapes", " extra"


def wire(stage: Stage, engine: PipelineEngine, depth: int) -> None:
    """Connect the channels of `stage` with the neighbours of `engine`, by links for schedules of `depth`.

    Every rank of the job calls it. On an eager link no order between the channels of a rank is left to break:
    see `channel_groups`.
    """
    config = stage.config
    seconds = config.block.link.timeout_s
    eager = config.block.link.mode == "eager"
    # NCCL's receive of a shape would hold the device
    shapes = [f"forward{SHAPES}"] if engine.dynamic_shape and not receives_hold_device(engine.device) else []
    groups = _first_connections(stage, engine, [*DIRECTIONS, *shapes]) if eager else {}

    def link(kind: type[Any], channel: Channel, neighbour: int, use: str = "") -> Any:
        own = groups.get((channel.boundary.number % 2, f"{channel.direction}{use}"), (None,))
        timeout = PeerTimeout(channel.place, seconds)
        peer, answers = engine.grid.stage_to_global(neighbour), channel.direction == "backward"
        return kind(peer, engine.device, own, timeout, depth, eager, answers)

    if eager and shapes:
        after, before = stage.after, stage.before
        stage.shape_links = ShapeLinks(
            link(Sender, after.forward, engine.next_stage, SHAPES) if after else None,
            link(Receiver, before.forward, engine.prev_stage, SHAPES) if before else None,
        )
    ends = (
        (stage.before, engine.prev_stage, schedule.RecvActivation, schedule.SendGrad),
        (stage.after, engine.next_stage, schedule.RecvGrad, schedule.SendActivation),
    )
    for boundary, neighbour, receives, sends in ends:
        if boundary is None:
            continue
        codec_stream = codec_stream_for(engine.device) if eager else CodecStream()
        come, go = boundary.channels if boundary is stage.before else boundary.channels[::-1]
        links = link(Receiver, come, neighbour), link(Receiver, come, neighbour, EXTRA)
        stage.receivers[receives, 0] = ReceivingEnd(come, *links, codec_stream)
        links = link(Sender, go, neighbour), link(Sender, go, neighbour, EXTRA)
        stage.senders[sends, 0] = SendingEnd(go, *links, codec_stream)
    wire_extra_links(stage, engine)
    given = config.block.link.connections
    set_connections(stage, engine, 1 if given == "auto" else given)


def describe_eager(stage: Stage, depth: str, dynamic_shape: bool, leaves_early: bool) -> str:
    """Return what the start-up line calls an eager link.

    Args:
        depth: the part of the line about the depth (`DepthController.describe`).
        dynamic_shape: of the engine.
        leaves_early: whether messages of the schedule in progress left as soon as they were computed.
    """
    several = f", {stage.connections} connections" if stage.connections > 1 else ""
    if dynamic_shape and stage.config.block.link.connections == "auto":
        several = ", connections auto, 1 because of dynamic_shape"
    if dynamic_shape and not stage.shape_links:
        return f"eager{depth}{several}, activations in DeepSpeed's order because of dynamic_shape"
    if leaves_early or not stage.ends:
        return f"eager{depth}{several}"
    return f"eager{depth}{several}, but every message in the order of the schedule"


def wire_extra_links(stage: Stage, engine: PipelineEngine) -> None:
    """Give extra packets groups of their own where codecs send them by now and they have none; every rank of
    the job calls it.
    """
    config = stage.config
    if config.block.link.mode != "eager":
        return
    missing = [d for d in DIRECTIONS if config.in_force.has_extra_payload(d) and d not in stage.extra_groups]
    if not missing or not stage.ends:  # of one stage there are none
        return
    uses = [f"{direction}{EXTRA}" for direction in missing]
    groups = _first_connections(stage, engine, uses)
    stage.extra_groups.update(missing)
    for end in stage.ends:
        direction = end.channel.direction
        if direction in missing:
            end.extra_link.groups = groups[end.channel.boundary.number % 2, f"{direction}{EXTRA}"]
    set_connections(stage, engine, stage.connections)


def _first_connections(
    stage: Stage, engine: PipelineEngine, uses: Sequence[str]
) -> dict[tuple[int, str], list[Any]]:
    """Return the connection over which each use of a boundary of `stage` goes, by (boundary % 2, use).

    Over gloo both ranks make it alone: a group of all ranks takes a socket for each of them, and on far links
    a second of the start. Over NCCL the first packet would make it, while the hosts of both ranks wait for
    each other: in mid-schedule for ever, if one sends an extra packet there and the other a gradient.
    """
    seconds = stage.config.block.link.timeout_s
    neighbours = {}
    for boundary, neighbour in ((stage.before, engine.prev_stage), (stage.after, engine.next_stage)):
        if boundary is not None:
            neighbours[boundary.number % 2] = engine.grid.stage_to_global(neighbour)
    in_order = [(parity, use) for parity in sorted(neighbours) for use in uses]
    if receives_hold_device(engine.device):
        groups = channel_groups(engine.num_stages - 1, uses, seconds)
        stage.groups += itertools.chain(*groups.values())
        for parity, use in in_order:
            meet(engine.global_rank, neighbours[parity], engine.device, groups[parity, use], seconds)
        return groups
    wanted = [(sorted([engine.global_rank, neighbours[parity]]), 1) for parity, _ in in_order]
    return dict(zip(in_order, connect(wanted, seconds)))


def set_connections(stage: Stage, engine: PipelineEngine, number: int) -> None:
    """Let channels and exchanges send over `number` connections from the next packet on; every rank of the
    job calls it, with no packet in flight. Over NCCL, which opens its own, and over DeepSpeed's group it
    stays one.

    Raises:
        TooFewFiles: on all ranks, before anything is changed.
    """
    if stage.config.block.link.mode != "eager" or receives_hold_device(engine.device):
        return
    links = {}
    for end in stage.ends:
        direction, parity = end.channel.direction, end.channel.boundary.number % 2
        links[parity, direction] = end.link
        if direction in stage.extra_groups:
            links[parity, f"{direction}{EXTRA}"] = end.extra_link
    in_order = [links[use] for use in sorted(links)]  # alike on every rank
    wanted = [
        (sorted([engine.global_rank, link.peer]), max(0, number - len(link.groups))) for link in in_order
    ]
    if number > 1:
        exchanges = sum(each.files_for(number) for each in stage.exchange_connections)
        require_files(engine.device, sum(more for _, more in wanted) + exchanges)
    for link, more in zip(in_order, connect(wanted, stage.config.block.link.timeout_s)):
        link.groups = [*link.groups[:number], *more]
    for each in stage.exchange_connections:
        each.set_number(number)
    stage.connections = number


def connect_sets(
    stage: Stage,
    engine: PipelineEngine,
    sets: Sequence[Sequence[int]],
    exchanged: str,
    sends_packets: bool = True,
) -> ExchangeConnections:
    """Connect the ranks of each of the `sets`; every rank of the job calls it.

    Args:
        exchanged: what the ranks send each other, for errors.
        sends_packets: over as many connections as channels have; sums have one.
    """
    seconds = stage.config.block.link.timeout_s
    connections = ExchangeConnections(sets, exchanged, seconds)
    stage.groups += connections.groups
    if sends_packets:
        if stage.connections > 1:
            require_files(engine.device, connections.files_for(stage.connections))
        connections.set_number(stage.connections)
        stage.exchange_connections.append(connections)
    return connections
