"""Which schedules launch kernels for the first time."""

import torch

from ds_compress.config import Config
from ds_compress.engine.stage import Stage, StepContext
from ds_compress.transport.staging import receives_hold_device


class NewKernels:
    """Finds the schedules that have to send and receive in DeepSpeed's own order.

    A device that loads a kernel may wait until all others have ended (CUDA_MODULE_LOADING, "lazy" if it is
    not set), and those of NCCL end when the neighbour takes part: two ranks would wait for each other.
    DeepSpeed's order has no such circle, so the first schedule of new kernels runs in it.
    """

    def __init__(self, config: Config, stage: Stage, device: torch.device):
        self._config = config
        self._stage = stage
        self._receives_hold_device = receives_hold_device(device)
        self._settings: object = None  # those of the latest training schedule
        self._have_run = set[tuple[bool, int]]()  # kinds with these settings: is the warm-up over; observers

    def must_run_in_order(self, context: StepContext) -> bool:
        """Return whether the schedule that begins now has to run in that order.

        It is asked once for each, as it remembers them.
        """
        config = self._config
        if not context.training or not self._receives_hold_device:
            return False
        if config.in_force is not self._settings:
            self._settings = config.in_force
            self._have_run.clear()
        observers = sum(len(end.observers) for end in self._stage.ends)
        kernels = context.step >= config.warmup_steps, observers
        is_new = kernels not in self._have_run
        self._have_run.add(kernels)
        return is_new
