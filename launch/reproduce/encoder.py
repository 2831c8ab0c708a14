"""Fine-tune an encoder of sentences: which of a batch's passages continues which.

A sample is a passage of WikiText-2 and the one after it. The loss is the cross entropy of picking the second
by the cosine of encodings, among those of the batch, as such models are trained (Reimers and Gurevych 2019).
Perplexity is its exponential: for a model that cannot tell them apart, the number of samples of a batch.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from launch.reproduce.architectures import encoder_layers
from launch.reproduce.language import Language
from launch.reproduce.task import Batch, existing, generator

TEMPERATURE = 0.05


class Encoder(Language):
    def _tokens(self, split: str) -> Tensor:
        text = existing(self._data / "wikitext2" / f"{split}.txt", "text").read_text()
        folder = existing(self._data / str(self.size.tokenizer), "tokenizer")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        return torch.tensor(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _cut(self, tokens: Tensor, blocks: int | None) -> Tensor:
        """Cut tokens into pairs of passages, int64 [blocks, 2, seq], each with what begins and ends one."""
        inner = self.size.seq - 2
        pairs = tokens[: len(tokens) // (2 * inner) * 2 * inner].view(-1, 2, inner)[:blocks]
        begin, end = (
            torch.full((*pairs.shape[:2], 1), token)
            for token in (self._tokenizer.cls_token_id, self._tokenizer.sep_token_id)
        )
        return torch.cat([begin, pairs, end], dim=2)

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        places = torch.arange(len(self._blocks)).split(self.size.batch)[: self.steps_per_epoch]
        for batch in torch.randperm(len(places), generator=generator(seed, number)).tolist():
            index = places[batch]  # neighbours, of one article: others would be told apart by their topic
            yield self._blocks[index].flatten(0, 1), torch.arange(len(index)), index

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        first, second = F.normalize(output, dim=1).unflatten(0, (-1, 2)).unbind(1)
        return F.cross_entropy(first @ second.T / TEMPERATURE, labels)

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """The perplexity of the choice."""
        batches = self._held_out.split(self.size.batch)
        losses = [
            self.loss(model(pairs.flatten(0, 1).to(device)), torch.arange(len(pairs), device=device)).item()
            for pairs in batches
        ]
        return {"perplexity": math.exp(sum(losses) / len(losses))}

    def _layers(self) -> list[nn.Module]:
        folder = existing(self._data / str(self.size.weights), "checkpoint of Transformers")
        return encoder_layers(AutoModel.from_pretrained(folder, dtype=torch.float32))
