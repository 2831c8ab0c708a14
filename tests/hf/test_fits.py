"""What a model cannot learn is refused before anything is built. It once ran into the end of the table of
positions, or of the embedding, in the first batch: `IndexError: index out of range in self` on one rank,
`Connection closed by peer` on the other, and an assertion of the device on a GPU."""

import json

import pytest
from transformers import AutoTokenizer

from ds_compress.errors import CompressionError
from ds_compress.hf.finetune import Run
from ds_compress.hf.settings import read
from tests.support.dist import run_ranks
from tests.support.finetuning import prepare, text


def refusal(path):
    """What this rank says to a run with that train.json."""
    with pytest.raises(CompressionError) as caught:
        Run(read(path))
    return str(caught.value)


def test_sequences_longer_than_the_model_has_positions(tmp_path):
    path = prepare(tmp_path, sequence_length=65)
    (said,) = run_ranks(1, refusal, path)
    assert said == (
        "train.json.sequence_length: 65 is not allowed: the model's config.json has "
        '"max_position_embeddings" for 64 tokens; should be at most that'
    )


def test_a_model_that_is_not_there(tmp_path):
    """It was once said of the tokenizer, which was looked for first, that the hub could not be reached."""
    (said,) = run_ranks(1, refusal, prepare(tmp_path, model=str(tmp_path / "nowhere")))
    assert said.startswith(
        f"{tmp_path / 'nowhere'}: model.safetensors is missing; should be the folder of a "
    )


def test_tokens_of_another_vocabulary(tmp_path):
    """A token that was added to the tokenizer and not to the model."""
    path = prepare(tmp_path)
    known = AutoTokenizer.from_pretrained(tmp_path / "model")
    known.add_tokens([f"new{number}" for number in range(20)])
    known.save_pretrained(tmp_path / "other")
    (tmp_path / "text.txt").write_text(text(20) + "\n\nnew19 " + text(20))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": str(tmp_path / "other")}))
    (said,) = run_ranks(1, refusal, path)
    assert said == (
        f"train.json.tokenizer: {tmp_path / 'other'}: it made a token 42, but the model's vocabulary has 32; "
        "should be the tokenizer that the model was trained with"
    )
