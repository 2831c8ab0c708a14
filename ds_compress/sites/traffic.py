"""Replicas that are launched apart: at which steps an engine exchanges its progress, and with which weights.

An exchange (`rounds.py`) runs in a thread, in host memory, during the next steps. All ranks of the launch
apply its result in the same step, or none does: then the replica joins the others again at the next exchange.
Training waits for other replicas, but not for a store without an answer.
"""

import functools
import json
import logging
import os
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_compress.config import Config
from ds_compress.config.replicas import STORE
from ds_compress.engine.deepspeed import PipelineEngine, copy_weights_to_parameters, has_partitions
from ds_compress.errors import CompressionError, in_one_line
from ds_compress.message.layout import Counters
from ds_compress.message.part import Engine, RuntimePart, Step
from ds_compress.replicas.slices import residual_norm
from ds_compress.sites.board import Position
from ds_compress.sites.join import Join, say
from ds_compress.sites.masters import build_delta_codec, find_masters, read_masters, write_masters
from ds_compress.sites.outer_step import Anchor
from ds_compress.sites.rounds import ExchangeResult, patience
from ds_compress.sites.store import PLACE, parse_address, reconnect, run_in_thread, shared_settings
from ds_compress.sites.worker import Worker
from ds_compress.transport.collectives import lowest, own_keys

ANSWER_S = 5.0
"""Seconds for which training waits for a store that does not answer."""
STORE_CONNECTIONS = 4
"""What `"connections": "auto"` means for the store. A single one reads more slowly on every far link
(docs/several-sites.md)."""
FAILED, LATE, HERE = range(3)
"""What an exchange has come to on a rank."""
STATE = 2**16
"""Checkpoint key of anchor, momentum, base and position; smaller keys are slices."""

log = logging.getLogger("ds_compress")


class OuterTraffic(RuntimePart):
    """The part of an engine that exchanges progress with other launches."""

    kind = "replicas"
    restarts = "outer steps begin again with the loaded weights"
    """What a checkpoint without usable state leads to."""

    @staticmethod
    def check(engine: PipelineEngine) -> None:
        """Refuse an engine whose replicas cannot be launched apart.

        Raises:
            CompressionError: names what is missing.
        """
        optimizer = engine.optimizer
        is_partitioned = has_partitions(optimizer)
        if engine.has_moe_layers:
            raise CompressionError(f"{PLACE}.every: MoE layers are not allowed between launches; use every 1")
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        if not is_partitioned and any(p.dtype != torch.float32 for p in trained):
            raise CompressionError(
                f"{PLACE}.every: {type(optimizer).__name__} has no fp32 weights that are known here; use "
                "bf16, or ZeRO 1"
            )
        if not is_partitioned and engine.is_data_parallel:
            raise CompressionError(
                f"{PLACE}.every: a launch with data-parallel ranks needs ZeRO 1, so that each has a part of "
                'the weights; set "zero_optimization": {"stage": 1}'
            )
        if dist.get_rank() == 0:
            parse_address(os.environ.get(STORE, ""))

    def __init__(self, engine: PipelineEngine, config: Config):
        """Read the master weights; every rank of the launch calls it alike.

        Args:
            config: of an engine that `check` accepts.
        """
        assert config.outer is not None
        self._device = engine.device
        self._options, self._shared = config.outer, shared_settings(config)
        given = config.block.link.connections
        self._connections = STORE_CONNECTIONS if given == "auto" else given
        assert config.block.replicas is not None
        self.every = config.block.replicas.every
        self._trained = [p for p in engine.module.parameters() if p.requires_grad]
        masters = find_masters(engine, self._trained)
        self.codec = build_delta_codec(config, masters)
        self._itemsize = engine.communication_data_type.itemsize
        self._worker: Worker | None = None  # None: this replica trains alone
        self._probe: Future[Any] | None = None  # rank 0: a new connection to the store, after one was lost
        self._residuals: dict[int, dict[str, Tensor]] = {}  # before the exchange in progress
        self.sent = Counters()
        self._round_s, self._members = 0.0, 0
        self.load({})

    def load(self, saved: dict[int, dict[str, Tensor]]) -> None:
        """Restore the state from a checkpoint; without one, start from the weights of the engine."""
        self.close()
        self._is_new = True  # whether it has met no other replicas since it was launched, or loaded
        self._pending: Future[ExchangeResult] | None = None
        self._is_late = False  # whether its result is there only after the step in which it was due
        self.anchor: Anchor | None = None  # until the first step
        self.position: Position | None = None
        self._began: int | None = None  # step after which the last round began
        found = saved.get(STATE, {})
        self.base: Tensor | None = found.get("base")
        """Base of the last exchange, until the weights have its result; see outer_step.py."""
        if found:
            self.anchor = Anchor(found["values"], found["momentum"])
            self.position = Position(*json.loads(found["position"].numpy().tobytes()))
            self._began = int(found["began"])
        self.codec.restore(saved)

    def describe(self) -> str:
        """Return what the start-up line says."""
        steps = f"{self.every} steps" if self.every > 1 else "step"
        return f"changes of weights between launches: {self.codec.codec} every {steps}"

    def values(self) -> dict[str, float]:
        """Return what the monitor writes of this rank, by name in `metrics.EXCHANGE`."""
        return {
            "raw_bytes": self.sent.raw_bytes,
            "wire_bytes": self.sent.wire_bytes,
            "residual_norm": residual_norm(self.codec.residuals().values()),
            "round_s": self._round_s,
            "rounds": self.sent.messages,
            "members": self._members,
        }

    def begin_step(self, step: Step) -> None:
        """Meet the other replicas before the first step.

        Raises:
            CompressionError: they have other settings, or the store cannot be reached.
        """
        engine = step.engine
        if self.anchor is None:
            values = self._read(engine)
            self.anchor = Anchor(values, torch.zeros_like(values))
        if self._began is None:
            self._began = engine.global_steps
        if self._is_new:
            self._join(engine)

    def end_step(self, step: Step) -> None:
        """Every `every` steps start an exchange; apply its result `delay` steps later."""
        engine = step.engine
        assert self._began is not None
        if self._is_late or step.number - self._began in (self._options.delay, self.every):
            self.collect()
            self._apply(engine)
        if step.number - self._began < self.every:
            return
        self._began = step.number
        if self._is_late:
            return
        self._check_trained(engine)
        has_just_come = self._worker is None and self._is_reachable() and self._join(engine)
        if self._worker is not None and not has_just_come:
            self._start(engine)
            if not self._options.delay:
                self.collect()
                self._apply(engine)

    def collect(self, is_last: bool = False) -> None:
        """Wait for the result of the exchange in progress, if there is one; all ranks get it, or none.

        If the store does not answer, training goes on, and the next call looks again.

        Args:
            is_last: no call follows, so a result that is late is lost.
        """
        if self._pending is None:
            return
        state, failure = self._await_result()
        (everywhere,) = lowest(self._device, state)
        self._is_late = everywhere == LATE and not is_last
        if self._is_late:
            return
        pending, self._pending = self._pending, None
        if everywhere != HERE:
            self._leave("the replica store does not answer" if state == LATE else failure)
            self.codec.restore(self._residuals)
            return
        progress = pending.result()
        self.anchor, self.position, self.base = progress.anchor, progress.position, progress.base
        count = len(progress.members)
        self._round_s, self._members = progress.seconds, count
        self.sent.messages += 1
        self.sent.wire_bytes += self.codec.nbytes
        if progress.is_member:
            values = 2 * (count - 1) * self.codec.numel // count
            self.sent.raw_bytes += values * self._itemsize * self.every

    def _await_result(self) -> tuple[int, str]:
        """Return what the exchange in progress has come to, and why it failed."""
        assert self._pending is not None and self._worker is not None
        while not wait([self._pending], 0.1).done:
            silence = self._worker.silence()
            if silence > patience(self._options):
                return FAILED, "the replica store does not answer"
            if silence > ANSWER_S:
                return LATE, ""
        error = self._pending.exception()
        return (HERE, "") if error is None else (FAILED, in_one_line(error))

    @property
    def settings(self) -> dict[str, Any]:
        """All that has to be the same for the state of a checkpoint to go on."""
        feedback = self.codec.codec.settings.get("feedback")  # a residual fits any codec
        return {"feedback": feedback, "every": self.every, "parameters": self.codec.digest}

    def saved(self) -> dict[int, dict[str, Tensor]]:
        """Return the state for a checkpoint: residuals by number of the slice, and under `STATE` the rest."""
        self.collect(is_last=True)
        if self.anchor is None or self.position is None:
            return {}
        position = torch.frombuffer(bytearray(json.dumps(self.position).encode()), dtype=torch.uint8)
        began = torch.tensor(self._began, dtype=torch.int64, device="cpu")
        found = {**self.anchor._asdict(), "position": position, "began": began}
        if self.base is not None:
            found["base"] = self.base
        return {**self.codec.residuals(), STATE: found}

    def close(self) -> None:
        """Leave the others."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _start(self, engine: Engine) -> None:
        """Send what was learned, in the background."""
        assert self._worker is not None and self.anchor is not None and self.position is not None
        self._residuals = self.codec.residuals()
        sent = self._read(engine)
        exchange = self._worker.rounds.exchange_delta
        task = functools.partial(exchange, self.anchor, self.position, sent, self.codec)
        self._pending = self._worker.run(task)

    def _apply(self, engine: Engine) -> None:
        """Give the weights the result of the last exchange, and keep what was learned since."""
        base, self.base = self.base, None
        if base is not None and self.anchor is not None:
            self._write(engine, self.anchor.values + (self._read(engine) - base))

    def _read(self, engine: Engine) -> Tensor:
        """Return a copy of the master weights, fp32, 1-D, in host memory."""
        return read_masters(find_masters(engine, self._trained))

    def _write(self, engine: Engine, values: Tensor) -> None:
        """Let master weights, and the parameters, have `values`."""
        write_masters(find_masters(engine, self._trained), values)
        copy_weights_to_parameters(engine.optimizer)

    def _leave(self, failure: str) -> None:
        """Leave the other replicas until the next exchange, and log why."""
        self.close()
        if dist.get_rank() == 0:
            self._probe = run_in_thread(reconnect, "ds_compress_probe")
        if failure:
            place = f"ds_compress: rank {dist.get_rank()}"
            log.warning(f"{place}: this replica trains on alone until it is back: {failure}")

    def _is_reachable(self) -> bool:
        """Return whether the store can be reached again, without a wait for it; all ranks call it."""
        if self._probe is not None and self._probe.done() and self._probe.exception() is not None:
            self._probe = run_in_thread(reconnect, "ds_compress_probe")
        return any(lowest(self._device, self._probe is None or self._probe.done()))

    def _check_trained(self, engine: Engine) -> None:
        """
        Raises:
            CompressionError: on every rank, if parameters are trained now that were frozen at first.
        """
        known, optimizer = set(map(id, self._trained)), engine.optimizer
        stepped = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        thawed = [
            name
            for name, p in engine.module.named_parameters()
            if p.requires_grad and id(p) in stepped and id(p) not in known
        ]
        if not any(lowest(self._device, not thawed)):
            which = f"{thawed[0]!r} is" if thawed else "parameters of another rank are"
            raise CompressionError(
                f"{PLACE}.every: {which} trained now, but not when deepspeed.initialize was called, so other "
                "replicas would never get it; unfreeze before that, in all launches; you may freeze later"
            )

    def _join(self, engine: Engine) -> bool:
        """Join the other replicas.

        Returns:
            Whether it is a newcomer, whose weights are those of the others now: there is nothing to send.

        Raises:
            CompressionError: on every rank, if this launch is new, and the others have other settings or the
                store cannot be reached.
        """
        assert self.anchor is not None
        is_first, self._is_new = self._is_new, False
        launch = own_keys(_get_default_store(), dist.get_rank(), "join")
        join = Join(launch, self._options, self._connections)
        join.say_own(self.codec.digest, self.anchor)
        if dist.get_rank() == 0:
            probe, self._probe = self._probe, None
            join.ask(self._shared, self.position, probe)
        verdict = join.hear()
        self.position, failure = verdict["own"], verdict.get("refused") or verdict.get("lost", "")
        if failure and is_first:
            raise CompressionError(failure if "refused" in verdict else f"{PLACE}.every: {failure}")
        anchor = None
        if not failure:
            try:
                anchor, position = join.enter(verdict, self.anchor)
            except (CompressionError, RuntimeError) as error:
                failure = in_one_line(error)
        self._worker = join.worker
        if not any(lowest(self._device, not failure)):
            self._leave(failure if dist.get_rank() == 0 or "membership" in verdict else "")
            return False
        self.position = position
        if anchor is not None:
            self.codec.restore({})
            self.anchor, self.base = anchor, None
            # the others began this round about `delay` steps ago, and would wait for a whole one of ours
            self._began = engine.global_steps - min(self._options.delay, self.every // 2)
            self._write(engine, anchor.values)
        place = f"{verdict['address']}, round {position.round}"
        weights = "its own weights" if anchor is None else "the others' weights"
        say(f"replica {verdict['membership'][0]} joins at {place}, with {weights}")
        return anchor is not None
