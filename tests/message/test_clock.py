"""Clocks of devices."""

from types import SimpleNamespace

import torch

from ds_compress.message.clock import clock_for


class Event:
    """Notes the stream on which it is recorded: by default that of the current device."""

    def __init__(self, **options):
        assert options == {"enable_timing": True}

    def record(self, stream="stream of cuda:0"):
        self.stream = stream


def test_marks_are_on_the_device_that_works(monkeypatch):
    """`advise --device cuda:1` and `launch/bench/gpu.py` never make it the current one: their marks were on
    the first, which has nothing to do, so that a codec seemed to take no longer than its launches."""
    cuda = SimpleNamespace(Event=Event, current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "cuda", cuda)
    assert clock_for(torch.device("cuda:1")).mark().stream == "stream of cuda:1"
