"""DeepSpeed's private names: all that ds_compress reads or overrides of its classes beside their public use.

`USED` lists them by class, with the releases in which each was found. `attach` checks them before it changes
an engine. Other files call the functions below; only mixins over DeepSpeed's classes, and `autoload`, which
runs before DeepSpeed is imported, use private names themselves. `tests/engine/test_deepspeed.py` checks both.
"""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param as is_moe_param
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer as BF16_Optimizer
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import p2p as p2p
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as DeepSpeedZeroOptimizer
from packaging.version import Version
from torch import Tensor

from ds_compress.errors import CompressionError
from ds_compress.message.part import Engine
from ds_compress.transport import staging

MINIMUM_DEEPSPEED = "0.19.3"
RELEASES = "0.19.3", "0.19.6", "0.19.8"
"""Those that the tests ran with (docs/pipelines.md)."""


class PipelineEngine(Engine, Protocol):
    """What this package uses of DeepSpeed's engine beside its private names, and beside what the parts do."""

    prev_stage: int
    next_stage: int
    mpu: Any
    training_data: Any
    skipped_steps: int
    communication_data_type: torch.dtype
    is_data_parallel: bool
    has_moe_layers: bool
    has_attention_mask: bool
    has_bool_tensors: bool
    is_pipe_partitioned: bool
    is_grad_partitioned: bool
    pipeline_enable_backward_allreduce: bool
    gradient_average: bool
    first_output_send: bool
    pipe_recv_buf: Any
    grad_layer: Any
    batch_fn: Any
    ds_compress: Any
    """The `Session`."""

    _AROUND: Any
    """Of our mixin: what runs instead of DeepSpeed's functions, by instruction."""

    def train_batch_size(self) -> int:
        """Return the samples of a step, of all replicas."""

    def zero_optimization(self) -> bool:
        """Return whether the optimizer is one of ZeRO."""

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO; 0: none."""

    def fp16_enabled(self) -> bool:
        """Return whether parameters are fp16."""

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bf16."""

    def reset_activation_shape(self) -> None:
        """Let the next batch announce its shapes again."""


class Used(NamedTuple):
    """Names of one of DeepSpeed's classes, or of a module of its."""

    overridden: tuple[str, ...] = ()
    """Methods that a mixin of ours, or a subclass, has too."""
    read: tuple[str, ...] = ()
    """What has to be there, on the class or on an object that has been built."""
    optional: tuple[str, ...] = ()
    """What some releases, or some states of an object, do not have."""
    releases: tuple[str, ...] = RELEASES
    """In which all of them, but for the optional ones, are."""


USED = {
    "PipelineEngine": Used(
        overridden=(
            *("train_batch", "eval_batch", "save_checkpoint", "load_checkpoint", "allreduce_bucket"),
            *("_exec_schedule", "_next_batch", "_send_tensor_meta", "_recv_tensor_meta"),
            *("_save_checkpoint", "_save_moe_checkpoint", "_load_checkpoint", "_allocate_or_extend_buffers"),
            *("_exec_send_activations", "_exec_recv_activations", "_exec_send_grads", "_exec_recv_grads"),
        ),
        read=(
            *("_INSTRUCTION_MAP", "_config", "pipe_buffers", "pipe_recv_buf", "grad_layer"),
            *("first_output_send", "total_loss", "total_additional_losses", "dynamic_shape"),
            *("has_attention_mask", "has_bool_tensors", "is_pipe_partitioned", "is_grad_partitioned"),
            *("has_moe_layers", "is_data_parallel", "pipeline_enable_backward_allreduce"),
            *("gradient_average", "communication_data_type", "using_bf16_optimizer"),
            *("prev_stage", "next_stage", "num_stages"),
            *("_get_ckpt_name", "_get_all_ckpt_names", "_copy_recovery_script"),
        ),
        optional=(
            *("_compute_loss", "loss", "fwd_outputs", "agg_train_loss", "torch_autocast_z0_gradscaler"),
            "_inference_schedule",  # from 0.19.8
        ),
    ),
    "DualPipeVEngine": Used(
        overridden=("_queue_p2p", "_exec_commit_p2p"),
        read=("_upstream_stage", "_downstream_stage"),
        optional=("_p2p_ops", "_first_send"),  # set after `attach`, which its base class calls
        releases=("0.19.8",),
    ),
    "PipelineModule": Used(
        overridden=("_partition_layers", "_build", "_synchronize_tied_weights"),
        read=(
            *("_local_start", "_local_stop", "_layer_specs", "_set_bounds", "_recursive_getattr"),
            *("tied_comms", "tied_modules", "micro_offset", "activation_checkpoint_interval", "parts"),
            "get_tied_weights_and_groups",
        ),
        optional=("active_phase", "activate_phase", "phase_bounds"),  # those of DualPipeVModule, from 0.19.8
    ),
    "DeepSpeedZeroOptimizer": Used(
        overridden=(
            *("allreduce_bucket", "allreduce_and_copy_with_multiple_ranks"),
            "gradient_reduction_w_predivide",
        ),
        read=(
            *("ipg_buckets", "get_gradient_for_reduction", "bit16_groups", "round_robin_bit16_groups"),
            *("single_partition_of_fp32_groups", "sequence_parallel_size", "dp_process_group"),
        ),
        optional=("round_robin_bit16_offsets", "torch_autocast_gradscaler"),  # the first from 0.19.8
    ),
    "BF16_Optimizer": Used(
        overridden=("step", "get_grads_for_norm", "update_lp_params"),
        read=(
            *("mpu", "bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
            *("fp32_groups_gradients", "fp32_groups_gradients_flat", "fp32_groups_gradient_flat_partition"),
            *("_update_hp_grad", "grad_acc_dtype"),
        ),
        optional=("torch_autocast_gradscaler",),
    ),
    "p2p": Used(overridden=("send", "recv", "can_send_recv")),
    "DeepSpeedConfig": Used(read=("_param_dict",)),
}
"""What we use, by class or module."""

DEEPSPEED = vars(pipe_engine)
"""Globals of the functions of DeepSpeed's own pipeline engine."""


def is_deepspeeds(function: Any) -> bool:
    """Return whether `function` is one of DeepSpeed's own pipeline engine."""
    return getattr(function, "__globals__", None) is DEEPSPEED


def missing(owner: str, found: Any) -> str:
    """Return the first of the names used of `owner` that `found`, an object or class, lacks; "" if none."""
    used = USED[owner]
    callable_ = (name for name in used.overridden if not callable(getattr(found, name, None)))
    there = (name for name in used.read if not hasattr(found, name))
    return next(itertools.chain(callable_, there), "")


def check_release(engine: Any) -> None:
    """Refuse a DeepSpeed whose pipeline `engine` is not built the way the mixin relies on.

    Raises:
        CompressionError: too old, or a name is missing; names it.
    """
    release = f"ds_compress: DeepSpeed {deepspeed.__version__}"
    if Version(deepspeed.__version__).release < Version(MINIMUM_DEEPSPEED).release:
        raise CompressionError(
            f'{release} has another pipeline engine; pip install "deepspeed>={MINIMUM_DEEPSPEED}"'
        )
    moved = schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad
    for instruction in (schedule.ForwardPass, schedule.BackwardPass, *moved):
        body = engine._INSTRUCTION_MAP.get(instruction)
        if body is None or "buffer_id" not in inspect.signature(body).parameters:
            raise CompressionError(
                f"{release}: unknown way to run {instruction.__name__}; it is not supported"
            )
    found = {"PipelineEngine": engine, "PipelineModule": engine.module, "p2p": p2p}
    if is_dualpipev(engine):
        found["DualPipeVEngine"] = engine
    for owner, each in found.items():
        if name := missing(owner, each):
            raise CompressionError(f"{release}: its {owner} has no {name}; it is not supported")


def is_pipeline(engine: Any) -> bool:
    """Return whether `engine` is a pipeline engine, of whatever class."""
    return all(hasattr(type(engine), name) for name in ("_exec_schedule", "_INSTRUCTION_MAP"))


def is_dualpipev(engine: Any) -> bool:
    """Return whether `engine` runs DualPipeV, which has a queue of its own for messages."""
    return hasattr(type(engine), "_queue_p2p")


def read_ds_config(path: Path) -> Any:
    """Return what a ds_config.json holds, read as `deepspeed.initialize` does: comments are allowed, and keys
    that come twice are refused.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: DeepSpeed does not read it.
    """
    path.stat()  # DeepSpeed takes what is not a file for base64
    try:
        return load_ds_config(str(path))
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error
    except OverflowError as error:
        raise ValueError("a number is beyond the range of floats") from error


def prepare() -> None:
    """Let DeepSpeed's own messages, of shapes and the like, reach a neighbour's GPU.

    Over a backend that cannot send a device's memory DeepSpeed would fail at the first of them. What it has
    for a torch without send and recv, broadcasts in groups of two, works there.
    """
    if staging.is_needed(torch.device(get_accelerator().device_name())):
        p2p.can_send_recv = lambda: False


def layer_range(module: Any) -> tuple[int, int]:
    """Return the first layer of this rank's stage, and the one after its last."""
    return module._local_start, module._local_stop


def loss_scale(engine: Any) -> float:
    """Return the loss scale; the same on all stages, as all skip the same steps."""
    # evaluation needs no optimizer
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() and engine.optimizer else 1.0


def steps_per_epoch(engine: PipelineEngine) -> int | None:
    """Return the training steps in one pass over the data that DeepSpeed was given; None if their number is
    not known."""
    try:
        return -(-len(engine.training_data) // engine.train_batch_size())
    except TypeError:
        return None


def announces_next(engine: Any, phase: int) -> bool:
    """Return whether a shape message goes before the next activations of a phase of DualPipeV, or of all."""
    due = getattr(engine, "_first_send", None)  # of DualPipeV
    return bool(engine.first_output_send if due is None else due[phase])


def instruction_map(engine: Any) -> Any:
    """Return the functions of an engine, or of its class, by instruction."""
    return engine._INSTRUCTION_MAP


def evaluate(engine: Any, micro_batches: int) -> list[Any]:
    """Run the forward passes of an evaluation; return what the last stage put out, [] on other stages."""
    if hasattr(engine, "_inference_schedule"):
        passes = engine._inference_schedule(micro_batches)
    else:
        passes = schedule.InferenceSchedule(micro_batches, engine.num_stages, engine.stage_id)
    engine._exec_schedule(passes)
    return list(engine.fwd_outputs) if engine.is_last_stage() else []


_LEFT_BY_EVALUATION = "total_loss", "total_additional_losses", "fwd_outputs", "loss", "_compute_loss"
"""Attributes of an engine that a schedule writes, and that programs read after a training step."""


@contextmanager
def evaluating(engine: Any) -> Iterator[None]:
    """Let passes of `engine` be those of an evaluation, and restore it afterwards."""
    module = engine.module
    modes = [(part, part.training) for part in module.modules()]
    attributes = {name: getattr(engine, name) for name in _LEFT_BY_EVALUATION if hasattr(engine, name)}
    passes = module.micro_offset  # DeepSpeed may seed the layers of a pass by its number
    phase = getattr(module, "active_phase", None)  # of DualPipeV
    try:
        # not `train()`: in it modules may do more than set a flag, such as merge adapters
        for part, _ in modes:
            part.training = False
        engine._compute_loss, engine.total_loss, engine.total_additional_losses = True, None, None
        yield
    finally:
        module.micro_offset = passes
        if phase is not None:
            module.activate_phase(phase)
        for part, training in modes:
            part.training = training
        for name, value in attributes.items():
            setattr(engine, name, value)


def neighbour_stages(engine: Any, phase: int) -> tuple[int, int]:
    """Return the ranks of the pipeline before and after this one in a phase of DualPipeV."""
    return engine._upstream_stage(phase), engine._downstream_stage(phase)


def queue_message(base: Any, operation: Any, tensors: list[Tensor], stage: int) -> None:
    """Queue a send or receive as DualPipeV does; `base`: its class, bound to an engine."""
    base._queue_p2p(operation, tensors, stage)


def take_queue(engine: Any) -> list[Any]:
    """Empty the queue of DualPipeV, and return what was in it."""
    operations, engine._p2p_ops = engine._p2p_ops, []
    return operations


def has_partitions(optimizer: Any) -> bool:
    """Return whether an optimizer holds fp32 weights in partitions that are known here."""
    return isinstance(optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer))


def partitioned_weights(optimizer: Any, rank: int, ranks: int) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield the parameters of which partition `rank` has values, where these start, and these, in fp32."""
    if isinstance(optimizer, BF16_Optimizer):
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        offsets = None
    else:
        groups, flats = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        offsets = getattr(optimizer, "round_robin_bit16_offsets", None)  # older releases do not pad
    for number, (group, flat) in enumerate(zip(groups, flats)):
        sizes = (parameter.numel() for parameter in group)
        starts = offsets[number] if offsets is not None else itertools.accumulate(sizes, initial=0)
        first = rank * flat.numel()
        for parameter, start in zip(group, starts):
            begin, end = max(start, first), min(start + parameter.numel(), first + flat.numel())
            if begin < end:
                yield parameter, begin - start, flat.detach()[begin - first : end - first]


def copy_weights_to_parameters(optimizer: Any) -> None:
    """Let parameters follow fp32 weights that have been written to, where they are others."""
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


def tied_weights(module: Any) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the tied weights of this stage: number of the key, number within it, and the weight."""
    keys = sorted({spec.key for spec in module._layer_specs if isinstance(spec, TiedLayerSpec)})
    for key, shared in module.tied_comms.items():
        for position, name in enumerate(shared["weight_attr"]):
            yield keys.index(key), position, module._recursive_getattr(module.tied_modules[key], name)


def tied_itemsize(engine: Any, weight: Any) -> int:
    """Return the bytes per value of the gradient of a tied weight that DeepSpeed sums over stages."""
    return (engine.optimizer.grad_acc_dtype if engine.using_bf16_optimizer else weight.dtype).itemsize


def tied_gradient(engine: Any, weight: Any) -> Tensor | None:
    """Return the gradient of a tied weight that DeepSpeed sums over stages; None if it has none."""
    return weight._hp_grad if engine.using_bf16_optimizer else weight.grad


def reduced_gradients(engine: Any) -> list[tuple[Any, Tensor | None]]:
    """Return the parameters of a stage that DeepSpeed's own all-reduce averages, with their gradients."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):  # views of flat buffers
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients)
        return [pair for group in groups for pair in zip(*group)]
    return [(parameter, parameter.grad) for parameter in engine.module.parameters()]


class FlatGroup(NamedTuple):
    """A group of parameters of a BF16_Optimizer."""

    parameters: list[Tensor]
    flat: Tensor  # all of them, bf16
    weights: Tensor  # fp32, the partition of this replica


def flat_groups(optimizer: Any) -> list[FlatGroup]:
    """Return the groups of a BF16_Optimizer."""
    flats = optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition
    return [*map(FlatGroup, optimizer.bf16_groups, *flats)]


def flat_gradient(optimizer: Any, group: int, position: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of a parameter in the flat fp32 buffer of a BF16_Optimizer, and that buffer."""
    return optimizer.fp32_groups_gradients[group][position], optimizer.fp32_groups_gradients_flat[group]


def add_to_flat_gradient(optimizer: Any, parameter: Tensor, group: int, position: int) -> None:
    """Add what a backward pass has computed to the flat gradient of a BF16_Optimizer, and forget it."""
    optimizer._update_hp_grad(parameter, group, position, clear_lp_grads=False)
    parameter.grad = None  # else it would be added again


def weights_files(engine: Any) -> list[str]:
    """Return the names of the files in which DeepSpeed saves this rank's state, and each of its layers."""
    module = engine.module
    layers = [n for n, layer in enumerate(module.forward_funcs) if hasattr(layer, "load_state_dict")]
    paths = [engine._get_ckpt_name("", ""), *(module.ckpt_layer_path("", number) for number in layers)]
    return [Path(path).name for path in paths]


def file_writers(engine: Any) -> list[tuple[Any, str]]:
    """Return what `save_checkpoint` writes files and makes folders with: objects, and the methods' names."""
    writer = engine.checkpoint_engine
    return [(writer, "save"), (writer, "makedirs"), (engine, "_copy_recovery_script")]


def load_own_file_only(engine: Any) -> None:
    """Let `load_checkpoint` find the files of this rank alone.

    DeepSpeed lists those of all stages, which this machine may not have, to read its own of them.
    """
    engine._get_all_ckpt_names = lambda *where: [engine._get_ckpt_name(*where)] * engine.mp_world_size
