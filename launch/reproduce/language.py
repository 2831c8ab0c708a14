"""Fine-tune a GPT-2 on WikiText-2: perplexity, next-token accuracy, quality of generated text.

Where no weights are given, a small GPT is first trained without compression on the beginning of the text and
kept in a file; every setting fine-tunes it on another part. Its tokens are bytes.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from launch.reproduce.presets import LanguageSize
from launch.reproduce.task import STAGES, Batch, existing, generator

BYTES = 256
PRETRAINED_ON = 0.9  # share of train.txt, at its start, where the model is pretrained here
PROMPT, GENERATED = 12, 32  # tokens given, and tokens drawn after them
PROMPTS = 16


class Embedding(nn.Module):
    """Token ids int64 [batch, seq] -> hidden states fp32 [batch, seq, hidden]."""

    def __init__(self, gpt: GPT2LMHeadModel):
        super().__init__()
        body = gpt.transformer
        self.token, self.position, self.dropout = body.wte, body.wpe, body.drop

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        return self.dropout(self.token(ids) + self.position(places))


class Head(nn.Module):
    """Hidden states [batch, seq, hidden] -> logits [batch, seq, vocabulary]."""

    def __init__(self, gpt: GPT2LMHeadModel):
        super().__init__()
        self.norm, self.logits = gpt.transformer.ln_f, gpt.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def as_layers(gpt: GPT2LMHeadModel) -> list[nn.Module]:
    """Return the layers of `gpt`, with its weights, as a sequence."""
    return [Embedding(gpt), *gpt.transformer.h, Head(gpt)]


def in_stages(layers: list[nn.Module]) -> list[nn.Module]:
    """Split layers into stages of equally many blocks; embedding and head join the first and the last."""
    each = (len(layers) - 2) // STAGES
    cuts = [0, *(1 + each * stage for stage in range(1, STAGES)), len(layers)]
    return [nn.Sequential(*layers[start:end]) for start, end in itertools.pairwise(cuts)]


class Language:
    name = "language"
    metric = "perplexity"

    def __init__(self, size: LanguageSize, data: Path, cache: Path):
        """`data`: folder with wikitext2/{train,valid}.txt; `cache`: where a pretrained model is kept."""
        self.size, self._data, self._cache = size, data, cache
        text = self._tokens("train")
        split = int(len(text) * PRETRAINED_ON) if size.weights is None else 0
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
        torch.manual_seed(seed)  # of dropout; the weights are the same for every seed
        return in_stages(as_layers(self._pretrained()))

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
        before fine-tuning."""
        loss, hits = 0.0, 0
        for block in self._held_out.split(self.size.batch):
            inputs, labels = block[:, :-1].to(device), block[:, 1:].to(device)
            logits = model(inputs)
            loss += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
            hits += (logits.argmax(-1) == labels).sum().item()
        tokens = self._held_out[:, 1:].numel()
        return {
            "perplexity": _exp(loss / tokens),
            "token_accuracy": hits / tokens,
            "generated_perplexity": self._judged(self._generated(model, device)),
        }

    def _generated(self, model: nn.Module, device: torch.device) -> Tensor:
        """Continue held-out prompts by sampling from the model."""
        text = self._held_out[:PROMPTS, :PROMPT].to(device)
        drawing = generator(0)
        for _ in range(min(GENERATED, self.size.seq - PROMPT)):
            chances = model(text)[:, -1].softmax(-1).cpu().nan_to_num(0, 0, 0) + 1e-9
            text = torch.cat([text, torch.multinomial(chances, 1, generator=drawing).to(device)], 1)
        return text

    def _judged(self, text: Tensor) -> float:
        judge = nn.Sequential(*as_layers(self._pretrained())).to(text.device).eval()
        logits = judge(text[:, :-1])[:, PROMPT - 1 :]
        return _exp(F.cross_entropy(logits.flatten(0, 1), text[:, PROMPT:].flatten()).item())

    def _pretrained(self) -> GPT2LMHeadModel:
        if self.size.weights is not None:
            return GPT2LMHeadModel.from_pretrained(
                existing(self._data / self.size.weights, "weights of GPT-2")
            )
        gpt = self._new()
        gpt.load_state_dict(load_file(self.prepare()), strict=True)
        return gpt

    def _new(self) -> GPT2LMHeadModel:
        size = self.size
        config = GPT2Config(
            vocab_size=BYTES,
            n_positions=size.seq,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            resid_pdrop=size.dropout,
            embd_pdrop=size.dropout,
            attn_pdrop=size.dropout,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
        return GPT2LMHeadModel(config)

    def prepare(self) -> Path:
        """Pretrain the model that every run starts from, unless its file exists."""
        size = self.size
        numbers = (size.layers, size.hidden, size.seq, size.pretrain_steps, size.pretrain_batch)
        path = self._cache / f"gpt-{'-'.join(map(str, numbers))}.safetensors"
        if size.weights is None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            save_file(self._pretrain().state_dict(), part)
            part.rename(path)
        return path

    def _pretrain(self) -> GPT2LMHeadModel:
        size, text = self.size, self._pretraining
        torch.manual_seed(0)
        gpt = self._new()
        model = nn.Sequential(*as_layers(gpt)).train()
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
        return gpt


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
