"""Engine subclasses that send through a `p2p` of their own module, and two more kinds of schedule."""

import inspect
import sys
import types
from pathlib import Path

import torch
from deepspeed.runtime.pipe import engine as deepspeed_engine
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from tests.support.pipeline import Block, loss_fn
from tests.support.programs import OwnSchedule


class NamedTensors(PipelineEngine):
    """Stages pass on dictionaries: before each tensor its name is sent, in two messages of integers."""

    def _recv_name(self, stage):
        length = torch.empty(1, dtype=torch.int64)
        p2p.recv(length, stage)
        codes = torch.empty(int(length), dtype=torch.int64)
        p2p.recv(codes, stage)
        return bytes(codes.tolist()).decode()

    def _send_tensor_meta(self, buffer, recv_stage):
        for tensor in buffer.values():
            p2p.send(torch.tensor(tensor.shape), recv_stage)

    def _recv_tensor_meta(self, send_stage):
        shape = torch.empty(3, dtype=torch.int64)
        p2p.recv(shape, send_stage)
        return {"hidden": torch.empty(shape.tolist())}

    def _send_outputs(self, buffer_id):
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.first_output_send:
            self.first_output_send = False
            self._send_tensor_meta(outputs, self.next_stage)
        for name, tensor in outputs.items():
            codes = torch.tensor(list(name.encode()))
            for part in (torch.tensor([len(codes)]), codes, tensor):
                p2p.send(part, self.next_stage)

    def _recv_inputs(self, buffer_id):
        if self.pipe_recv_buf is None:
            self.pipe_recv_buf = self._recv_tensor_meta(self.prev_stage)
        inputs = {}
        for _ in self.pipe_recv_buf:
            name = self._recv_name(self.prev_stage)
            p2p.recv(self.pipe_recv_buf[name], self.prev_stage)
            inputs[name] = self.pipe_recv_buf[name].clone().requires_grad_()
        self.pipe_buffers["inputs"][buffer_id] = inputs

    def _send_gradients(self, buffer_id):
        p2p.send(self.pipe_buffers["inputs"][buffer_id].grad, self.prev_stage)

    def _recv_gradients(self, buffer_id):
        self.grad_layer = torch.empty_like(self.pipe_buffers["outputs"][buffer_id]["hidden"])
        p2p.recv(self.grad_layer, self.next_stage)

    def _forward(self, buffer_id):
        inputs = self.pipe_buffers["inputs"]
        if isinstance(inputs[buffer_id], dict):
            inputs[buffer_id] = inputs[buffer_id]["hidden"]
        self._exec_forward_pass(buffer_id)
        if not self.is_last_stage():
            outputs = self.pipe_buffers["outputs"]
            outputs[buffer_id] = {"hidden": outputs[buffer_id]}

    def _backward(self, buffer_id):
        outputs = self.pipe_buffers["outputs"]
        if not self.is_last_stage():
            outputs[buffer_id] = outputs[buffer_id]["hidden"]
        self._exec_backward_pass(buffer_id)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _forward,
        schedule.BackwardPass: _backward,
        schedule.SendActivation: _send_outputs,
        schedule.RecvActivation: _recv_inputs,
        schedule.SendGrad: _send_gradients,
        schedule.RecvGrad: _recv_gradients,
    }


copied = sys.modules["tests.support.copied_engine"] = types.ModuleType("tests.support.copied_engine")
"""The module of the installed DeepSpeed's engine, once more under another name."""
copied.__package__, copied.__file__ = deepspeed_engine.__package__, deepspeed_engine.__file__
exec(compile(Path(deepspeed_engine.__file__).read_text(), deepspeed_engine.__file__, "exec"), vars(copied))
CopiedEngine = copied.PipelineEngine
CopiedEngine.__module__ = copied.__name__


class BuiltItsOwnWay(PipelineEngine):
    """Does in its constructor what DeepSpeed's pipeline engine does in its own, without calling that."""

    def __init__(self, *args, **kwargs):
        inspect.unwrap(PipelineEngine.__init__)(self, *args, **kwargs)


class SendsMore(PipelineEngine):
    """Sends a note with each message, before or behind it; both sides add up the notes that they received."""

    like_the_message = False
    first = False

    def _note(self, buffer_id):
        if not self.like_the_message:
            return torch.full((3,), float(self.global_steps))
        message = self.pipe_buffers["outputs" if self.is_first_stage() else "inputs"][buffer_id]
        return torch.full_like(message.detach(), 0.5)

    def _send(self, kind, stage, buffer_id):
        note = self._note(buffer_id)
        if self.first:
            p2p.send(note, stage)
        PipelineEngine._INSTRUCTION_MAP[kind](self, buffer_id)
        if not self.first:
            p2p.send(note, stage)

    def _receive(self, kind, stage, buffer_id):
        note = torch.empty(3)
        if self.first:
            p2p.recv(note, stage)
        PipelineEngine._INSTRUCTION_MAP[kind](self, buffer_id)
        if not self.first:
            note = torch.empty_like(self._note(buffer_id))
            p2p.recv(note, stage)
        self.notes = getattr(self, "notes", 0.0) + note.sum().item()

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.SendActivation: lambda self, buffer_id: self._send(
            schedule.SendActivation, self.next_stage, buffer_id
        ),
        schedule.RecvActivation: lambda self, buffer_id: self._receive(
            schedule.RecvActivation, self.prev_stage, buffer_id
        ),
        schedule.SendGrad: lambda self, buffer_id: self._send(schedule.SendGrad, self.prev_stage, buffer_id),
        schedule.RecvGrad: lambda self, buffer_id: self._receive(
            schedule.RecvGrad, self.next_stage, buffer_id
        ),
    }


class SendsFirst(SendsMore):
    first = True


class SendsAlike(SendsMore):
    like_the_message = True


class OwnFunctions(PipelineEngine):
    """Took `send` and `recv` out of DeepSpeed's module before ds_compress came."""

    _sends, _receives = staticmethod(p2p.send), staticmethod(p2p.recv)

    def _send_outputs(self, buffer_id):
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.first_output_send:
            self.first_output_send = False
            self._send_tensor_meta(outputs, self.next_stage)
        self._sends(outputs, self.next_stage)

    def _recv_inputs(self, buffer_id):
        if self.pipe_recv_buf is None:
            self.pipe_recv_buf = self._recv_tensor_meta(self.prev_stage)
        self._receives(self.pipe_recv_buf, self.prev_stage)
        self.pipe_buffers["inputs"][buffer_id] = self.pipe_recv_buf.clone().detach().requires_grad_()

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.SendActivation: _send_outputs,
        schedule.RecvActivation: _recv_inputs,
    }


def received_notes(engine):
    return [getattr(engine, "notes", 0.0)]


class InputGradient(schedule.BufferOpInstruction):
    """A backward pass that leaves the gradients of weights for later."""


class WeightGradient(schedule.PipeInstruction):
    """The gradients of weights that the oldest `InputGradient` has left."""


class LaterLinear(nn.Linear):
    """Keeps what its weight's gradient is made of until `make_gradient`."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.left = []

    def forward(self, x):
        y = nn.functional.linear(x, self.weight.detach(), self.bias.detach())
        if y.requires_grad:
            y.register_hook(lambda gradient: self.left.append((x.detach(), gradient)))
        return y

    def make_gradient(self):
        x, gradient = (part.flatten(0, -2) for part in self.left.pop(0))
        for parameter, found in ((self.weight, gradient.t() @ x), (self.bias, gradient.sum(0))):
            parameter.grad = found if parameter.grad is None else parameter.grad + found


class LaterBlock(Block):
    def __init__(self):
        super().__init__()
        self.up, self.down = LaterLinear(32, 64), LaterLinear(64, 32)


class ZeroBubbleSchedule(schedule.TrainSchedule):
    """Sends the input's gradient before it computes those of weights, the last of which fill the pause."""

    def steps(self):
        left = 0
        for commands in super().steps():
            made = []
            for command in commands:
                if isinstance(command, schedule.BackwardPass):
                    made.append(InputGradient(command.buffer_id))
                    left += 1
                elif isinstance(command, schedule.SendGrad):
                    made += [command, WeightGradient()]
                    left -= 1
                elif isinstance(command, schedule.ReduceTiedGrads):
                    made += [WeightGradient() for _ in range(left)] + [command]
                else:
                    made.append(command)
            yield made


class ZeroBubble(OwnSchedule):
    schedule_class = ZeroBubbleSchedule

    def _weight_gradient(self):
        for layer in self.module.modules():
            if isinstance(layer, LaterLinear):
                layer.make_gradient()

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        InputGradient: PipelineEngine._exec_backward_pass,
        WeightGradient: _weight_gradient,
    }


class Reference(schedule.BufferOpInstruction):
    """The pass of a frozen model, whose result crosses in a message of its own."""


class LoadTwice(schedule.PipeInstruction):
    """Loads a micro-batch for the policy and for the reference."""


class PreferenceSchedule(schedule.TrainSchedule):
    """1F1B; the reference's result crosses before the policy's, from a buffer that micro-batches share."""

    def steps(self):
        return _with_reference(super().steps(), lambda buffer: self.num_pipe_buffers() - 1)

    def num_pipe_buffers(self):
        return super().num_pipe_buffers() + 1

    def _buffer_idx(self, micro_batch_id):
        return micro_batch_id % (self.num_pipe_buffers() - 1)


class PreferenceInference(schedule.InferenceSchedule):
    """The same without backward passes; as many buffers for the reference as for the policy."""

    def steps(self):
        return _with_reference(super().steps(), lambda buffer: buffer + 2)

    def num_pipe_buffers(self):
        return 4


def _with_reference(steps, reference_of):
    """`steps` with a pass of the reference, and its messages, before each forward pass of the policy."""
    for commands in steps:
        made = []
        for command in commands:
            buffer = command.kwargs.get("buffer_id")
            if isinstance(command, schedule.LoadMicroBatch):
                made.append(LoadTwice(buffers=(buffer, reference_of(buffer))))
                continue
            if isinstance(command, schedule.ForwardPass):
                made.append(Reference(reference_of(buffer)))
            elif isinstance(command, (schedule.SendActivation, schedule.RecvActivation)):
                made.append(type(command)(reference_of(buffer)))
            made.append(command)
        yield made


class Preference(OwnSchedule):
    """Trains a policy away from a reference: two messages for each micro-batch, in evaluation too."""

    schedule_class = PreferenceSchedule

    def _inference_schedule(self, micro_batches):
        return PreferenceInference(micro_batches, self.num_stages, self.stage_id)

    def _load_twice(self, buffers):
        inputs, labels = self._next_batch()
        for buffer in buffers:
            self.pipe_buffers["inputs" if self.is_first_stage() else "labels"][buffer] = (
                inputs.clone() if self.is_first_stage() else labels
            )

    def _reference(self, buffer_id):
        with torch.no_grad():
            found = 0.5 * self.module(self.pipe_buffers["inputs"][buffer_id].clone())
        if self.is_last_stage():
            self.module.loss_fn = lambda output, target: (
                loss_fn(output, target) + 0.1 * loss_fn(output, found)
            )
        else:
            self.pipe_buffers["outputs"][buffer_id] = found

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, LoadTwice: _load_twice, Reference: _reference}
