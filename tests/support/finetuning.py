"""Make small Transformers checkpoints, one of each family, and fine-tune them."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ds_compress.hf.data import Sequences
from ds_compress.hf.part import causal_lm_loss
from ds_compress.hf.settings import read_settings
from ds_compress.hf.transformers_pipeline import LoadedPart, load_config, plan_parts
from launch.ports import reserved_port
from tests.support.interpreters import TRAINING, interpreter
from tests.support.pipeline import ds_config
from tests.support.ranks import once

WORDS = ["the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "old", "young", "red", "green", "house"]
WORDS += ["tree", "river", "and", "or", "not"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
BLOCK = {"forward": {"codec": {"name": "quantize", "bits": 8}}, "backward": {"codec": "bf16"}, "min_numel": 1}
DS_CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
DS_CONFIG |= {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}}
DS_CONFIG |= {"gradient_clipping": 0.0, "steps_per_print": 100000}
"""Without the block."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    known = ["<unk>", "</s>", "<user>", "<assistant>", ".", *WORDS]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def text(paragraphs: int) -> str:
    """Sentences in which a word says much about the next one."""
    draw = random.Random(5)
    follows = {word: draw.sample(WORDS, 3) for word in WORDS}

    def sentence() -> str:
        words = [draw.choice(WORDS)]
        while len(words) < 12:
            words.append(draw.choice(follows[words[-1]]))
        return " ".join([*words, "."])

    return "\n\n".join(" ".join(sentence() for _ in range(3)) for _ in range(paragraphs))


def part_loaders(
    folder: Path, lora: Any = None, quantize: Any = None, dtype: Any = None, positions: bool = False
) -> list[Callable[[], LoadedPart]]:
    """Functions that load the parts of the model in `folder`, in order."""
    template, part_ids, _ = plan_parts(load_config(folder), 1, lora, dtype, positions, quantize)
    return [partial(LoadedPart, template, part_id, folder, lora) for part_id in part_ids]


def prepare(folder: Path, family: str = "Llama", layers: int = 2, **changes: Any) -> Path:
    """train.json beside all that it names, in `folder`; `changes` to its keys."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**shape, **heads, **tokens)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(text(120))
    settings = {"model": str(folder / "model"), "out": str(folder / "out")}
    settings |= {"data": {"train": str(folder / "text.txt")}, "lora": {"r": 8, "dropout": 0.1}}
    settings |= {"sequence_length": 32, "stages": 2, "steps": 6, "save_every": 2}
    settings |= {"ds_config": {**DS_CONFIG, "ds_compress": {**BLOCK, "eval": "uncompressed"}}, **changes}
    path = folder / "train.json"
    path.write_text(json.dumps(settings, indent=2))
    return path


LAUNCHERS = {
    "deepspeed": "{folder}/deepspeed --num_gpus 2 --master_port {port} --module",
    "torchrun": "-m torch.distributed.run --nproc_per_node 2 --master_port {port} -m",
    "accelerate": "-m accelerate.commands.launch --use_deepspeed --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port {port} -m",
}


def command(launcher: str, port: int, arguments: list[str], python: str = sys.executable) -> list[str]:
    """Two ranks of the program, by one of the launchers, in processes of that interpreter."""
    folder = Path(sys.executable).parent
    start = [word.format(folder=folder, port=port) for word in LAUNCHERS[launcher].split()]
    return [python, *start, "ds_compress.hf.finetune", *arguments]


def environment() -> dict[str, str]:
    """In which a run needs neither GPU nor network."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def finetune(launcher: str, path: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """What the launcher wrote and returned."""
    with reserved_port() as port:
        words = command(launcher, port, [str(path)], python)
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def finished_run() -> Path:
    """Return train.json of a finished run, which tests share; its file `output` has what it said."""

    def run(folder: Path) -> None:
        done = finetune("torchrun", prepare(folder), python=interpreter(TRAINING))
        (folder / "output").write_text(done.stderr)

    return once("finetuned", run) / "train.json"


def perplexities(output: str) -> list[float]:
    """Return those before, or of the step that a run goes on from, and after."""
    before, after = (rf"perplexity {when}: ([0-9.]+)" for when in (r"(?:before|of step \d+)", "after"))
    return [float(re.search(pattern, output).group(1)) for pattern in (before, after)]


def perplexity(path: Path, model: Any) -> float:
    """Of the sequences that a run with this train.json holds out."""
    settings = read_settings(path)
    data = Sequences(settings, AutoTokenizer.from_pretrained(settings.tokenizer or settings.model))
    found = []
    for (ids, positions), labels in data.held_out(settings.ds_config["train_micro_batch_size_per_gpu"], 0, 1):
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, position_ids=positions, use_cache=False).logits
        logits = logits[:, :-1].float().mT
        found.append(torch.nn.functional.cross_entropy(logits, labels[:, 1:], ignore_index=-100).item())
    return math.exp(sum(found) / len(found))


def losses(out: Path) -> dict[int, float]:
    """The loss of every step, the last one where a step was run twice."""
    rows = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def change(path: Path, **changes: Any) -> Path:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def copy_of(path: Path, folder: Path) -> Path:
    """The same run in another folder, which it has all to itself."""
    folder.mkdir()
    return change(Path(shutil.copy(path, folder)), out=str(folder / "out"))


logging.disable_progress_bar()

VOCABULARY = 96
LAYERS = 4
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 6}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
TIED = {"tie_word_embeddings": True}
ROTARY = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
LATENT = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
NO_GROUPS = {"num_key_value_heads": None, "intermediate_size": None}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **NO_GROUPS}),
    "Llama": ("Llama", {}),
    "Llama, tied, linear rotary scaling": ("Llama", {**TIED, **ROTARY}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, tied": ("Qwen2", TIED),
    "Qwen2, windows": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "Qwen3": ("Qwen3", HEAD),
    "Mistral": ("Mistral", WINDOW),
    "Gemma": ("Gemma", HEAD),
    "Gemma 2": ("Gemma2", {**HEAD, **WINDOW}),
    "Gemma 3": ("Gemma3Text", {**HEAD, **WINDOW}),
    "Phi-3": ("Phi3", {}),
    "OLMo 2": ("Olmo2", {}),
    "OPT": ("OPT", {"dropout": 0, "ffn_dim": 48, "word_embed_proj_dim": 16, **NO_GROUPS}),
    "Cohere": ("Cohere", {}),
    "SmolLM3": ("SmolLM3", {}),
    "GLM-4": ("Glm4", HEAD),
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": None}),
    "Granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 4, **HEAD, **EXPERTS}),
    "DeepSeek-V3": ("DeepseekV3", {"n_routed_experts": 4, **LATENT, **EXPERTS}),
    "GPT-OSS": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **HEAD, **WINDOW}),
    "BLOOM": ("Bloom", NO_GROUPS),
    "Falcon": ("Falcon", NO_GROUPS),
    "GPT-J": ("GPTJ", {"rotary_dim": 8, **NO_GROUPS}),
}
FAMILIES = tuple(CHANGES)


def config(family: str) -> transformers.PretrainedConfig:
    name, changes = CHANGES[family]
    keys = {key: value for key, value in {**SIZES, **changes}.items() if value is not None}
    return getattr(transformers, f"{name}Config")(**keys)


def save(family: str, folder: Path, **options: Any) -> Path:
    """A checkpoint of that family, as a user has it."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32)
    for parameter in model.parameters():  # no bias or gain that hides a mistake
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    return folder


def load_model(folder: Path) -> PreTrainedModel:
    """The checkpoint as Transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def batch(number: int = 0, length: int = 17) -> tuple[Tensor, Tensor]:
    """Token ids and labels, [2, length] int64, some labels left out."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return ids, labels


def start_engine(module: Any, sequences: int, micro_batches: int, block: Any = None, **changes: Any) -> Any:
    """An engine for what is not frozen, with steps of so many micro-batches of so many sequences."""
    sizes = {"train_micro_batch_size_per_gpu": sequences, "gradient_accumulation_steps": micro_batches}
    config = ds_config(block, **sizes, train_batch_size=sequences * micro_batches, **changes)
    trained = [p for p in module.parameters() if p.requires_grad]
    return deepspeed.initialize(model=module, config=config, model_parameters=trained)[0]


def run_model(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Logits, loss and gradients by name of parameter."""
    logits = model(ids, use_cache=False).logits
    loss = causal_lm_loss(logits, labels)
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}
