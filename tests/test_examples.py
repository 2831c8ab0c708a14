"""examples/: each file runs as it is, and does what it says."""

import ast
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.support.launch_scripts import ROOT, load_script
from tests.support.ranks import run_ranks

MINIMAL = ROOT / "examples" / "minimal.py"
BITS = {"fp32": 32, "4 bits": 4.25}
"""Bits of a value, by the name of a run: 4 bits have two bf16 numbers for each 128 values."""


@pytest.fixture(scope="module")
def minimal():
    return load_script("../examples/minimal")


def values_sent(minimal):
    """Values that the two ranks send each other: as many activations as gradients."""
    return 2 * minimal.STEPS * minimal.MICRO_BATCHES * minimal.SAMPLES * minimal.WIDTH


def test_minimal_is_one_short_file_that_needs_torch_alone():
    text = MINIMAL.read_text()
    assert len(text.splitlines()) <= 150
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    roots = {name.partition(".")[0] for name in names}
    assert roots - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.extended
def test_minimal_runs_and_its_loss_falls(minimal, tmp_path):
    done = subprocess.run([sys.executable, MINIMAL], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(.+): loss ([\d.]+) -> ([\d.]+), ([\d,]+) bytes sent$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in found] == list(BITS), done.stdout
    for name, first, last, nbytes in found:
        assert float(last) < 0.6 * float(first), done.stdout
        assert int(nbytes.replace(",", "")) == values_sent(minimal) * BITS[name] / 8
    (_, _, uncompressed, _), (_, _, compressed, _) = found
    assert float(compressed) == pytest.approx(float(uncompressed), rel=0.05)


RANK = """
import os, sys
sys.path.insert(0, sys.argv[1])
import minimal
minimal.STEPS = 2
minimal.run(int(sys.argv[2]), os.path.abspath("rendezvous"))
print([open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")])
"""


@pytest.mark.extended
def test_minimal_ends_with_its_group_and_not_before(tmp_path):
    """A thread of gloo that still ran at exit, on a busy machine, and freed a tensor of Python's, aborted."""
    command = [sys.executable, "-c", RANK, MINIMAL.parent]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for rank in ranks:
        output, _ = rank.communicate()
        assert rank.returncode == 0 and "python" in output and "gloo" not in output, output


def counted(compresses):
    """What a rank says that it has sent, and what torch.distributed was handed."""
    module, send, handed = load_script("../examples/minimal"), dist.send, []
    module.STEPS = 2
    dist.send = lambda tensor, peer: (handed.append(tensor.nbytes), send(tensor, peer))
    return module.train(dist.get_rank(), compresses)["bytes_sent"], sum(handed)


@pytest.mark.parametrize("compresses", [False, True])
def test_minimal_counts_the_bytes_that_it_hands_over(compresses):
    for said, handed in run_ranks(2, counted, compresses):
        assert said == handed > 0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_minimal_loses_half_a_step_at_most(minimal, scale):
    x = scale * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    packet = minimal.encode(x)
    assert packet.dtype == torch.uint8 and packet.numel() == minimal.packet_bytes(x.shape)
    groups, decoded = x.view(-1, minimal.GROUP), minimal.decode(packet, x.shape).view(-1, minimal.GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    rounding = (low.abs() + high.abs()) / 256  # of bf16
    assert ((decoded - groups).abs() <= (high - low) / 30 + 2 * rounding).all()


def test_minimal_sends_later_what_it_lost(minimal, monkeypatch):
    """The sum of all messages arrives, but for one residual."""
    packets = []
    monkeypatch.setattr(dist, "send", lambda packet, peer: packets.append(packet))
    messages = torch.randn(50, 2, 128, generator=torch.Generator().manual_seed(0))
    channel = minimal.Channel(1, compresses=True, has_feedback=True)
    for message in messages:
        channel.send(message)
    arrived = sum(minimal.decode(packet, message.shape) for packet, message in zip(packets, messages))
    assert torch.allclose(arrived + channel.residual, messages.sum(0), atol=1e-4)
    assert not torch.allclose(arrived, messages.sum(0), atol=1e-4)
