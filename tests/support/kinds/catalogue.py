"""All the kinds, by name."""

import inspect

from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.support.kinds.kind import LAYERS, Kind, of, of_lengths, tied, turned
from tests.support.models import CopiedTurned, Masked, Mixed, ParallelBlock, Skip, Turned

try:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
except ImportError:  # before DeepSpeed 0.19.8
    DualPipeVModule = None


class OwnEngine(PipelineEngine):
    """A project's engine with an instruction map of its own."""

    sent = 0

    def _send(self, buffer_id):
        type(self).sent += 1
        PipelineEngine._exec_send_activations(self, buffer_id)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, schedule.SendActivation: _send}


def _checkpoints() -> bool:
    """Before 0.19.7 DeepSpeed's checkpointing asks every device for a stream, and a CPU has none."""
    return "Stream(device" not in inspect.getsource(checkpointing) or get_accelerator().Stream is not None


# DeepSpeed runs the backward pass once for each float tensor of a tuple, so gradients are added in another
# order
SEPARATE = 1e-5
ZERO_1 = {"zero_optimization": {"stage": 1}}
KINDS = {
    "tensor": Kind("one tensor", stages=3),
    "mixed": Kind(
        "tuple with int64, bool and small float tensors", specs=lambda: of(Mixed), simulated=SEPARATE
    ),
    "mixed-middle": Kind(
        "the same with a middle stage", stages=3, specs=lambda: of(Mixed), stock=False, simulated=SEPARATE
    ),
    "mixed-dynamic": Kind(
        "the same, `dynamic_shape`",
        stages=3,
        specs=lambda: of(Mixed),
        stock=False,
        module={"dynamic_shape": True},
        data=of_lengths([8, 3, 16, 5]),
        simulated=SEPARATE,
    ),
    "floats": Kind("tuple with several float tensors", stages=3, specs=lambda: of(Skip), simulated=SEPARATE),
    "positions": Kind(
        'the same, `"tensors": [0, 2]`',
        stages=3,
        specs=lambda: of(Skip),
        simulated=SEPARATE,
        block={"tensors": [0, 2]},
    ),
    "mask": Kind(
        "`has_attention_mask`",
        stages=3,
        specs=lambda: of(Masked),
        prepare=lambda engine: engine.set_has_attention_mask(True),
    ),
    "dynamic": Kind(
        "`dynamic_shape`", stages=3, module={"dynamic_shape": True}, data=of_lengths([8, 3, 16, 5])
    ),
    "reset": Kind(
        "`reset_activation_shape()` before every batch",
        data=of_lengths([8] * 4 + [5] * 4),
        before_batch=lambda engine: engine.reset_activation_shape(),
    ),
    "strides": Kind(
        "outputs that are not contiguous (stock: a copy)",
        specs=lambda: turned(Turned),
        stock_specs=lambda: turned(CopiedTurned),
    ),
    "reentrant": Kind(
        "activation checkpointing",
        possible=_checkpoints,
        config={"pipeline": {"activation_checkpoint_interval": 1}},
    ),
    "non-reentrant": Kind(
        "activation checkpointing, non-reentrant",
        possible=_checkpoints,
        config={"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
    ),
    "tied": Kind("tied weights, first and last stage", stages=3, specs=tied, simulated=None),
    "clipping": Kind("gradient clipping", config={"gradient_clipping": 0.05}, simulated=None),
    "data-parallel": Kind("PP 2 x DP 2", ranks=4, config={"replicas": 2}, simulated=None),
    "zero-1": Kind("PP 2 x DP 2, ZeRO-1", ranks=4, config={"replicas": 2, **ZERO_1}, simulated=None),
    "bf16": Kind("bf16, BF16_Optimizer", config={"bf16": {"enabled": True}}, simulated=None),
    "bf16-zero-1": Kind("bf16, ZeRO-1", config={"bf16": {"enabled": True}, **ZERO_1}, simulated=None),
    "fp16": Kind(
        "fp16, ZeRO-1, dynamic loss scale",
        simulated=None,
        config={"fp16": {"enabled": True, "initial_scale_power": 8}, **ZERO_1},
    ),
    "autocast": Kind(
        "torch_autocast to bf16",
        config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        simulated=None,
    ),
    "tp-partitioned": Kind(
        "TP 2 x PP 2, partitioned activations",
        ranks=4,
        module={"tensor_parallel": 2},
        specs=lambda: [LayerSpec(ParallelBlock)] * LAYERS,
        simulated=None,
    ),
    "tp-full": Kind(
        "TP 2 x PP 2, full activations",
        ranks=4,
        module={"tensor_parallel": 2},
        simulated=None,
        specs=lambda: [LayerSpec(ParallelBlock)] * LAYERS,
        same_packets=2,
        config={"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}},
    ),
    "own-map": Kind("a subclass with an instruction map of its own", engine_class=OwnEngine),
    "depth": Kind('`"link": {"depth": 2}`', block={"link": {"depth": 2}}),
    "depth-data-parallel": Kind(
        '`"link": {"depth": 3}`, PP 2 x DP 2, ZeRO-1, bf16',
        ranks=4,
        config={"replicas": 2, "bf16": {"enabled": True}, **ZERO_1},
        simulated=None,
        block={"link": {"depth": 3}},
    ),
    "dualpipev": Kind(
        "DualPipeV, 2 ranks with 4 stages", module={"module_class": DualPipeVModule}, simulated=None
    ),
}
if DualPipeVModule is None:
    del KINDS["dualpipev"]
