"""Build small language models as sequences of layers: embedding, equal blocks, head.

gpt      LayerNorm, learned positions, GELU (Radford et al. 2019), by transformers
llama    RMSNorm, rotary positions, SwiGLU (Touvron et al. 2023)
tied     llama whose head has the weight of the embedding
moe      llama with four experts in place of the MLP, two of them for each token (Shazeer et al. 2017)
neox     attention and MLP in parallel, LayerNorm, rotary positions in a quarter of each head (Black et
         al. 2022)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertModel, GPT2Config, GPT2LMHeadModel

from launch.reproduce.presets import LanguageSize, TiedSize

BYTES = 256  # tokens of a model that is pretrained here
ROTARY_BASE = 10_000.0


class GptEmbedding(nn.Module):
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

    def __init__(self, norm: nn.Module, logits: nn.Module):
        super().__init__()
        self.norm, self.logits = norm, logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class DecoderBlock(nn.Module):
    """One block of a Transformers decoder with rotary positions and causal attention."""

    def __init__(self, block: nn.Module, rotary: nn.Module):
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        return self.block(x, position_embeddings=self.rotary(x, places))


def as_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a causal language model of Transformers, with its weights, as a sequence.

    Args:
        model: a `GPT2LMHeadModel`, or a decoder arranged as a Llama.
    """
    if isinstance(model, GPT2LMHeadModel):
        return [GptEmbedding(model), *model.transformer.h, Head(model.transformer.ln_f, model.lm_head)]
    body = model.model
    blocks = [DecoderBlock(block, body.rotary_emb) for block in body.layers]
    return [body.embed_tokens, *blocks, Head(body.norm, model.lm_head)]


class MeanOfTokens(nn.Module):
    """Hidden states [batch, seq, hidden] -> encodings of the passages, [batch, hidden]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def encoder_layers(model: BertModel) -> list[nn.Module]:
    """Return the layers of a BERT, with its weights, as a sequence; all tokens of its inputs are real."""
    return [model.embeddings, *model.encoder.layer, MeanOfTokens()]


class RotaryAttention(nn.Module):
    """Causal attention; the first `rotated` values of each head turn with the position (Su et al. 2021)."""

    def __init__(self, hidden: int, heads: int, rotated: int, bias: bool):
        super().__init__()
        self.heads, self.rotated = heads, rotated
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        split = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self._turn(query), self._turn(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))

    def _turn(self, x: Tensor) -> Tensor:
        """`x`: [batch, heads, seq, values of a head]."""
        half = self.rotated // 2
        speeds = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.size(2), device=x.device).unsqueeze(1) * speeds
        first, second, rest = x.split([half, half, x.size(3) - 2 * half], dim=3)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=3)


class LlamaBlock(nn.Module):
    """Attention, then a gated MLP of 8/3 the width."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        wide = 8 * hidden // 3
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.attention = RotaryAttention(hidden, heads, hidden // heads, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Gated MLPs of 8/3 the width, of which a router picks two for each token and weighs their outputs."""

    def __init__(self, hidden: int, count: int = 4, chosen: int = 2):
        super().__init__()
        wide = 8 * hidden // 3
        self.chosen = chosen
        self.router = nn.Linear(hidden, count, bias=False)
        self.gate_up = nn.ModuleList(nn.Linear(hidden, 2 * wide, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(wide, hidden, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).topk(self.chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            place = (experts == number).nonzero(as_tuple=True)
            token = place[:-1]
            gate, up = gate_up(x[token]).chunk(2, dim=-1)
            mixed = mixed.index_put(token, weights[place].unsqueeze(-1) * down(F.silu(gate) * up), True)
        return mixed


class MoeBlock(nn.Module):
    """Attention, then experts."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.attention = RotaryAttention(hidden, heads, hidden // heads, bias=False)
        self.experts = Experts(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.experts(self.mlp_norm(x))


class NeoxBlock(nn.Module):
    """Attention and MLP beside each other, each of the block's input."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = RotaryAttention(hidden, heads, hidden // heads // 4, bias=True)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x)) + self.down(F.gelu(self.up(self.mlp_norm(x))))


def gpt(size: LanguageSize) -> list[nn.Module]:
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
    return as_layers(GPT2LMHeadModel(config))


def llama(size: LanguageSize) -> list[nn.Module]:
    blocks = [LlamaBlock(size.hidden, size.heads) for _ in range(size.layers)]
    return _rotary(size, blocks, nn.RMSNorm(size.hidden, eps=1e-5))


def tied(size: LanguageSize) -> list[nn.Module]:
    tokens = size.vocabulary if isinstance(size, TiedSize) else BYTES
    layers = llama(size)
    layers[0] = embedding = nn.Embedding(tokens, size.hidden)
    layers[-1].logits = nn.Linear(size.hidden, tokens, bias=False)
    nn.init.normal_(embedding.weight, std=0.02)
    layers[-1].logits.weight = embedding.weight
    return layers


def moe(size: LanguageSize) -> list[nn.Module]:
    blocks = [MoeBlock(size.hidden, size.heads) for _ in range(size.layers)]
    return _rotary(size, blocks, nn.RMSNorm(size.hidden, eps=1e-5))


def neox(size: LanguageSize) -> list[nn.Module]:
    return _rotary(
        size, [NeoxBlock(size.hidden, size.heads) for _ in range(size.layers)], nn.LayerNorm(size.hidden)
    )


def _rotary(size: LanguageSize, blocks: list[nn.Module], norm: nn.Module) -> list[nn.Module]:
    """Put an embedding without positions before `blocks`, and a head after them; weights as in GPT-2."""
    layers = [
        nn.Embedding(BYTES, size.hidden),
        *blocks,
        Head(norm, nn.Linear(size.hidden, BYTES, bias=False)),
    ]
    for module in nn.ModuleList(layers).modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return layers


ARCHITECTURES: dict[str, Callable[[LanguageSize], list[nn.Module]]] = {
    "gpt": gpt,
    "llama": llama,
    "tied": tied,
    "moe": moe,
    "neox": neox,
}
