"""Train a language model on WikiText-2: perplexity, next-token accuracy, quality of generated text.

To fine-tune where no weights are given, a small model is first trained without compression on the beginning
of the text and kept in a file; every setting fine-tunes it on another part. Its tokens are bytes. Without
such steps every setting trains from random weights.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.reproduce.architectures import ARCHITECTURES, as_layers
from launch.reproduce.presets import LanguageSize
from launch.reproduce.task import STAGES, Batch, existing, generator, weights_file

PRETRAINED_ON = 0.9  # share of train.txt, at its start, where the model is pretrained here
PROMPT, GENERATED = 12, 32  # tokens given, and tokens drawn after them
PROMPTS = 16


def in_stages(layers: list[nn.Module]) -> list[nn.Module]:
    """Split layers into stages of equally many blocks; embedding and head join the first and the last."""
    each = (len(layers) - 2) // STAGES
    cuts = [0, *(1 + each * stage for stage in range(1, STAGES)), len(layers)]
    return [nn.Sequential(*layers[start:end]) for start, end in itertools.pairwise(cuts)]


class Language:
    metric = "perplexity"

    def __init__(self, size: LanguageSize, data: Path, cache: Path):
        """`data`: folder with wikitext2/{train,valid}.txt; `cache`: where a pretrained model is kept."""
        self.size, self._data, self._cache = size, data, cache
        text = self._tokens("train")
        split = int(len(text) * PRETRAINED_ON) if size.pretrain_steps else 0
        self._pretraining, self._blocks = text[:split], self._cut(text[split:], size.blocks)
        self._held_out = self._cut(self._tokens("valid"), size.test_blocks)
        self.epochs, self.gradient_clipping = size.epochs, size.gradient_clipping
        self.steps_per_epoch = len(self._blocks) // size.batch

    def _tokens(self, split: str) -> Tensor:
        text = existing(self._data / "wikitext2" / f"{split}.txt", "text").read_text()
        if self.size.tokenizer is None:
            return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        folder = existing(self._data / self.size.tokenizer, "tokenizer")
        return torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])

    def _cut(self, tokens: Tensor, blocks: int | None) -> Tensor:
        """Cut tokens into int64 [blocks, seq + 1]: labels are the inputs, one token later."""
        seq = self.size.seq + 1
        found = tokens[: len(tokens) // seq * seq].view(-1, seq)[:blocks]
        if len(found) < (blocks or 1):
            raise SystemExit(
                f"reproduce: {self._data}/wikitext2: {len(found)} blocks of {seq} tokens; the preset needs "
                f"{blocks or 1}"
            )
        return found

    def stages(self, seed: int) -> list[nn.Module]:
        torch.manual_seed(seed)
        return in_stages(self._layers())

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        order = torch.randperm(len(self._blocks), generator=generator(seed, number))
        for index in order[: self.steps_per_epoch * self.size.batch].split(self.size.batch):
            yield self._blocks[index, :-1], self._blocks[index, 1:], index

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.size.lr, weight_decay=0.0)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        steps = self.epochs * self.steps_per_epoch
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Perplexity a token, share of tokens predicted, and the perplexity of generated text to the model
        before fine-tuning, if there was one."""
        loss, accuracy = self.predict(model, device)
        measured = {"perplexity": _exp(loss), "token_accuracy": accuracy}
        if self.size.pretrain_steps:
            measured["generated_perplexity"] = self._judged(self._generated(model, device))
        return measured

    def predict(
        self, model: nn.Module, device: torch.device, blocks: int | None = None
    ) -> tuple[float, float]:
        """Predict the tokens of the first `blocks` of held-out text, by default of all; return the loss, in
        nats a token, and the share of tokens predicted."""
        text, loss, hits = self._held_out[:blocks], 0.0, 0
        for block in text.split(self.size.batch):
            inputs, labels = block[:, :-1].to(device), block[:, 1:].to(device)
            logits = model(inputs)
            loss += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
            hits += (logits.argmax(-1) == labels).sum().item()
        tokens = text[:, 1:].numel()
        return loss / tokens, hits / tokens

    def _generated(self, model: nn.Module, device: torch.device) -> Tensor:
        """Continue held-out prompts by sampling from the model."""
        text = self._held_out[:PROMPTS, :PROMPT].to(device)
        drawing = generator(0)
        for _ in range(min(GENERATED, self.size.seq - PROMPT)):
            chances = model(text)[:, -1].softmax(-1).cpu().nan_to_num(0, 0, 0) + 1e-9
            text = torch.cat([text, torch.multinomial(chances, 1, generator=drawing).to(device)], 1)
        return text

    def _judged(self, text: Tensor) -> float:
        judge = nn.Sequential(*self._layers()).to(text.device).eval()
        logits = judge(text[:, :-1])[:, PROMPT - 1 :]
        return _exp(F.cross_entropy(logits.flatten(0, 1), text[:, PROMPT:].flatten()).item())

    def _layers(self) -> list[nn.Module]:
        """Return the layers that training starts from."""
        if self.size.weights is not None:
            folder = existing(self._data / self.size.weights, "checkpoint of Transformers")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            rank = getattr(self.size, "lora_rank", 0)
            if rank:
                adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
                model = get_peft_model(model, adapters).get_base_model()
            return as_layers(model)
        layers = ARCHITECTURES[self.size.architecture](self.size)
        if self.size.pretrain_steps:
            nn.Sequential(*layers).load_state_dict(load_file(self._weights()), strict=True)
        return layers

    def prepare(self) -> None:
        """Pretrain the model that every run starts from, if there is one."""
        if self.size.pretrain_steps:
            self._weights()

    def _weights(self) -> Path:
        size = self.size
        numbers = (size.layers, size.hidden, size.seq, size.pretrain_steps, size.pretrain_batch)
        name = f"{size.architecture}-{'-'.join(map(str, numbers))}.safetensors"
        return weights_file(self._cache / name, self._pretrain)

    def _pretrain(self) -> nn.Module:
        size, text = self.size, self._pretraining
        torch.manual_seed(0)
        model = nn.Sequential(*ARCHITECTURES[size.architecture](size)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.pretrain_lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, size.pretrain_steps)
        drawing, window = generator(1), torch.arange(size.seq + 1)
        for step in range(size.pretrain_steps):
            starts = torch.randint(len(text) - size.seq, (size.pretrain_batch, 1), generator=drawing)
            block = text[starts + window]
            loss = self.loss(model(block[:, :-1]), block[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 100 == 0:
                print(f"pretraining, step {step}: loss {loss.item():.3f} a byte", flush=True)
        return model


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
