"""The idea of ds_compress in one file: two pipeline stages that send each other 4 bits per value.

    python examples/minimal.py

Two processes, connected by gloo, train a model of two stages to predict the next character of this file. They
do it twice: with fp32 messages, and with 4 bits per value. Needs torch alone; ds_compress is not imported.
docs/architecture.md names the part of the package that does each of these things in a DeepSpeed pipeline.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: its defaults would keep it, and gloo may abort at exit
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, MICRO_BATCHES, SAMPLES = 60, 4, 64
CONTEXT, WIDTH = 8, 256  # characters that predict the next one; values of a sample at the boundary
GROUP = 128  # values that share a scale


def encode(x: Tensor) -> Tensor:
    """Quantize to 16 levels between the extremes of each group, two codes a byte.

    Args:
        x: fp32, a multiple of GROUP values.

    Returns:
        The packet, uint8 [bytes]: the codes of all groups, then minimum and step of each group in bf16.
    """
    groups = x.reshape(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    low = low.bfloat16()  # rounded before it is used, so that the receiver uses the same one
    step = ((high - low) / 15).clamp(min=1e-30).bfloat16()
    codes = ((groups - low.float()) / step.float()).round().clamp(0, 15).to(torch.uint8).view(-1, 2)
    packed = codes[:, 0] | codes[:, 1] << 4
    return torch.cat([packed, torch.cat([low, step], dim=1).view(torch.uint8).flatten()])


def decode(packet: Tensor, shape: torch.Size) -> Tensor:
    """Return what the packet of a tensor of `shape` says, fp32."""
    count = shape.numel()
    packed, ranges = packet[: count // 2], packet[count // 2 :]
    codes = torch.stack([packed & 15, packed >> 4], dim=1).view(-1, GROUP).float()
    low, step = ranges.view(torch.bfloat16).float().view(-1, 2).split(1, dim=1)
    return (low + codes * step).view(shape)


def packet_bytes(shape: torch.Size) -> int:
    """Return the bytes of a packet: they follow from the shape, so the receiver allocates them beforehand."""
    return shape.numel() // 2 + shape.numel() // GROUP * 4


class Channel:
    """One direction of the boundary: this rank sends to the other one, or receives from it.

    Error feedback adds to each message what the messages before it have lost. The optimizer adds gradients
    up, so what one message loses arrives with later ones. Only the sender knows the residual.
    """

    def __init__(self, peer: int, compresses: bool, has_feedback: bool = False):
        self.peer, self.compresses, self.has_feedback = peer, compresses, has_feedback
        self.residual: Tensor | float = 0.0
        self.bytes_sent = 0

    def send(self, message: Tensor) -> None:
        packet = message = message.detach() + self.residual
        if self.compresses:
            packet = encode(message)
            if self.has_feedback:
                self.residual = message - decode(packet, message.shape)
        dist.send(packet, self.peer)
        self.bytes_sent += packet.nbytes

    def receive(self, shape: torch.Size) -> Tensor:
        if not self.compresses:
            message = torch.empty(shape)
            dist.recv(message, self.peer)
            return message
        packet = torch.empty(packet_bytes(shape), dtype=torch.uint8)
        dist.recv(packet, self.peer)
        return decode(packet, shape)


def make_stage(rank: int) -> nn.Module:
    """Return the layers of a rank; the same at each call."""
    torch.manual_seed(rank)
    if rank == 0:
        return nn.Sequential(nn.Embedding(128, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, WIDTH), nn.GELU())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 128))


def micro_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Draw characters of this file, int64 [SAMPLES, CONTEXT], and the next ones, the same on both ranks."""
    text = torch.tensor(list(Path(__file__).read_bytes())).clamp(max=127)
    windows, generator = text.unfold(0, CONTEXT + 1, 1), torch.Generator().manual_seed(0)
    while True:
        chosen = windows[torch.randint(len(windows), (SAMPLES,), generator=generator)]
        yield chosen[:, :-1], chosen[:, -1]


def train(rank: int, compresses: bool) -> dict[str, list[float] | int]:
    """Train one stage; return the loss of each step, known to the last stage, and the bytes that it sent."""
    stage, data, losses = make_stage(rank), micro_batches(), list[float]()
    optimizer = torch.optim.Adam(stage.parameters(), lr=2e-3)
    activations = Channel(1 - rank, compresses)
    gradients = Channel(1 - rank, compresses, has_feedback=True)
    boundary = torch.Size([SAMPLES, WIDTH])
    for _ in range(STEPS):
        batch = [next(data) for _ in range(MICRO_BATCHES)]
        if rank == 0:
            outputs = [stage(inputs) for inputs, _ in batch]
            for output in outputs:
                activations.send(output)
            for output in outputs:
                output.backward(gradients.receive(boundary))
        else:
            received = [activations.receive(boundary).requires_grad_() for _ in batch]
            loss = torch.zeros(())
            for hidden, (_, labels) in zip(received, batch):
                part = F.cross_entropy(stage(hidden), labels) / MICRO_BATCHES
                part.backward()
                gradients.send(hidden.grad)
                loss += part.detach()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "bytes_sent": activations.bytes_sent + gradients.bytes_sent}


def run(rank: int, rendezvous: str) -> None:
    """Train as one of two ranks, with and without compression; the last rank prints a line for each run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for name, compresses in (("fp32", False), ("4 bits", True)):
        result = train(rank, compresses)
        sent = torch.tensor(result["bytes_sent"])
        dist.all_reduce(sent)  # by both ranks
        if rank == 1:
            first, *_, last = result["losses"]
            print(f"{name}: loss {first:.2f} -> {last:.2f}, {sent.item():,} bytes sent", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/rendezvous",), nprocs=2)
