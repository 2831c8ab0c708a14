"""Ways in which a state file goes bad: by accident, and by what a confused program would write."""

import json
import struct

import torch
from safetensors.torch import save

from ds_compress.checkpoint import file as state_file

NUMBERS = (True, -1, 2**70, 1.5, float("nan"))
RANDOM_JSON = (None, *NUMBERS, "", "x", [], [1], ["a", 5], {}, {"a": 1}, {"a": {"b": []}})


def flipped(content, rng):
    content = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def cut(content, rng):
    return content[: rng.randrange(len(content))]


def longer(content, rng):
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.randint(1, 64)) + content[at:]


def noise(content, rng):
    return rng.randbytes(rng.choice([0, 1, 7, 8, 9, 1000]))


def huge_header(content, rng):
    return struct.pack("<Q", rng.choice([2**63, 2**64 - 1, 2**40, 99_999_999])) + content[8:]


def huge_shape(content, rng):
    """The header declares a tensor of 2^50 entries, in the bytes there are or far beyond."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    entry["shape"] = rng.choice([[2**50], [2**40, 2**40], [0, 2**62]])
    if rng.random() < 0.5:
        entry["data_offsets"][1] = 2**50
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def opened(path):
    """Entries and metadata of the file."""
    with state_file.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118


def unsigned(path, rng):
    """Entries that changed places or form, or another text, under the hashes of before."""
    entries, texts = opened(path)
    one, other = rng.sample(sorted(entries), 2)
    how = rng.randrange(8)
    if how == 0:
        entries[one], entries[other] = entries[other], entries[one]
    elif how == 1:
        entries[f"{one}x"] = entries.pop(one)
    elif how == 2:
        del entries[one]
    elif how == 3:
        entries[rng.choice(["", "x", f"{one}x"])] = torch.zeros(rng.choice([0, 3]))
    elif how == 4:
        entries[one] = entries[one].reshape(*entries[one].shape, 1)
    elif how == 5:
        other = torch.uint8 if entries[one].dtype == torch.int8 else torch.int8
        entries[one] = entries[one].view(other)
    elif how == 6:
        text = list(texts["state"])
        at = rng.randrange(len(text))
        text[at] = rng.choice([letter for letter in '0123456789abcdef"{}[],: \\x' if letter != text[at]])
        texts["state"] = "".join(text)
    else:
        texts[rng.choice(["state", "hash", "format"])] = rng.choice(["", "{}", "0" * 16])
    return save(entries, texts)


def signed(path, entries, **changes):
    """The file with other entries or metadata, its hashes made anew."""
    metadata = json.loads(opened(path)[1]["state"])
    names = sorted(entries)
    metadata["names"] = state_file._hash_of_text(json.dumps(names))
    metadata["hashes"] = "".join(state_file._hash_of_entry(name, entries[name]) for name in names)
    text = json.dumps({**metadata, **changes})
    return save(entries, {"state": text, "hash": state_file._hash_of_text(text)})


def wrong_type(path, rng):
    """A field of the metadata, or all of it, is of another type."""
    entries, texts = opened(path)
    metadata = json.loads(texts["state"])
    field = rng.choice(sorted(metadata))
    other = [value for value in RANDOM_JSON if type(value) is not type(metadata[field])]
    if field in ("settings", "eight_bits"):
        other = [value for value in other if value is not None and value != {}]
    if rng.random() < 0.1:
        text = rng.choice(["", "[]", "null", "[" * 100_000, '{"step": ' + "9" * 5000 + "}", "\\ud800"])
        return save(entries, {"state": text, "hash": state_file._hash_of_text(text)})
    return signed(path, entries, **{field: rng.choice(other)})


def wrong_content(path, rng):
    """Entries that no release writes."""
    entries, _ = opened(path)
    kinds = (sorted(name for name in entries if part in name) for part in (".codes", ".scales", "lowrank"))
    codes, scales, basis = map(rng.choice, kinds)
    how = rng.randrange(4)
    if how == 0:
        entries[scales] = entries[scales] * rng.choice([float("nan"), float("inf")])
    elif how == 1:
        entries[codes] = entries[codes].float()
    elif how == 2:
        del entries[scales]
    else:
        value = entries[basis]
        entries[basis] = rng.choice([value.double(), value * float("nan"), torch.zeros(2, 3)])
    return signed(path, entries)


ACCIDENTS = [flipped, cut, longer, noise, huge_header, huge_shape]
MISTAKES = [unsigned, wrong_type, wrong_content]


def damaged(path, content, rng):
    """`content` of the file at `path`, damaged in some way, and the name of the way."""
    way = rng.choice(ACCIDENTS + MISTAKES)
    return bytes(way(content, rng) if way in ACCIDENTS else way(path, rng)), way.__name__
