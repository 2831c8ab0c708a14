"""A channel: layouts are made once, both packets come back as one value, and a message has one name."""

import pytest
import torch

from ds_compress.codec import Codec, Context, MessageId, TensorSpec
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary
from ds_compress.message.packet import Header, PacketLayout
from ds_compress.transport.packet_memory import Packet
from tests.support.refusals import refusal


def boundaries(codec, **changes):
    config = Config({"forward": {"codec": codec}, "min_numel": 0, **changes})
    return Boundary(2, config), Boundary(2, config)


@pytest.fixture
def hashed(monkeypatch):
    """What was hashed: specs, and the settings of packets."""
    seen = []
    original, init = TensorSpec.__hash__, PacketLayout.__init__
    monkeypatch.setattr(TensorSpec, "__hash__", lambda self: seen.append(self) or original(self))
    monkeypatch.setattr(PacketLayout, "__init__", lambda self, *a: seen.append(a) or init(self, *a))
    return seen


@pytest.mark.parametrize("codec", ["none", "quantize", {"name": "topk", "density": 0.3}])
@pytest.mark.parametrize("warmup", [0, 5])
def test_no_layout_is_hashed_for_a_message_like_the_one_before(codec, warmup, hashed):
    sender, receiver = boundaries(codec, warmup_steps=warmup)
    for step in range(4):
        before = len(hashed)
        for micro_batch in range(3):
            for training in (True, False):
                tensors = torch.randn(4, 64), torch.arange(7)
                message_id = sender.forward.message_id(step, micro_batch, training)
                packet, rest, _ = sender.forward.encode(tensors, message_id)
                layout = receiver.forward.layout_of(tensors, message_id)
                arrived = receiver.forward.decode(packet, layout, message_id)
                assert rest is None and torch.equal(arrived[1], tensors[1])
        assert (len(hashed) > before) == (step == 0)


def test_other_shapes_dtypes_and_kinds_get_their_own_layout():
    boundary, _ = boundaries("bf16")
    boundary.dependence = True, True
    channel = boundary.forward
    x, now = torch.randn(4, 64), MessageId(2)
    layout = channel.layout_of([x], now)
    kinds = [x.half()], [x.half().to("meta")], [x[:2]], [x, x]  # each like the one before but for one thing
    others = [channel.layout_of(kind, now) for kind in kinds]
    channel.uncompressed_tail = 1
    others.append(channel.layout_of([x, x], now))
    channel.uncompressed_tail = 0
    assert len({id(each) for each in (layout, *others)}) == 6
    assert channel.layout_of([x], now) is layout is channel.layout_of((TensorSpec.of(x),), now)
    assert [each.packet.nbytes for each in others[3:]] == [32 + 2 * 512, 32 + 512 + 1024]


def test_what_forward_left_goes_though_the_answer_crosses_as_it_is():
    boundary, _ = boundaries({"name": "topk", "density": 0.5}, backward={"codec": "none"})
    x, number = torch.randn(4, 64), torch.arange(7)
    boundary.forward.encode([number, x], boundary.forward.message_id(0, 0))
    assert boundary._stashes[0, 0]
    boundary.backward.encode([number, x], boundary.backward.message_id(0, 0, training=False))
    assert boundary._stashes[0, 0]
    boundary.backward.encode([number, x], boundary.backward.message_id(0, 0))
    assert not boundary._stashes


def test_the_process_keeps_the_memory_that_messages_of_a_kind_take(monkeypatch):
    kept = []
    monkeypatch.setattr("ds_compress.message.channel.retain_freed_memory", kept.append)
    channel = boundaries("fp16")[0].forward
    for _ in range(2):
        channel.layout_of([torch.zeros(4, 64, dtype=torch.bfloat16), torch.arange(7)], MessageId(2))
        channel.layout_of([torch.zeros(4, 64, device="meta")], MessageId(2))
    assert kept == [1024]


MASK = "it depends on no parameter or holds a mask"


def test_a_size_that_follows_from_the_data_is_a_bound():
    """The start-up line said `lossless 4,096 -> 4,176 bytes (0.98x)` of messages of 3,554 bytes."""
    channel = Boundary(0, Config({"recipe": "lossless", "min_numel": 0})).forward
    channel.encode([torch.randn(4, 8, 32)], channel.message_id(0, 0))
    assert channel.sent.latest.describe(channel.codec) == "at most: the size follows from the data"


def test_what_depends_on_parameters_changes_the_layout():
    boundary, _ = boundaries("bf16")
    x, now = torch.randn(4, 64), MessageId(2)
    assert boundary.forward.layout_of([x, x], now).exempt == ["not known to depend on parameters"] * 2
    boundary.dependence = True, False
    assert boundary.forward.layout_of([x, x], now).exempt == ["", MASK]
    exempt = boundary.forward.layout_of([x, x, x], now).exempt
    assert exempt == ["", MASK, "not known to depend on parameters"], "of one tensor more nothing is known"
    boundary.dependence = None
    assert all(boundary.forward.layout_of([x, x], now).exempt)
    assert boundaries("bf16", min_numel=x.numel())[0].forward.layout_of([x], now).exempt == [""]


def test_a_gradient_has_the_layout_of_its_activation():
    """With `dynamic_shape` an activation of more or fewer tensors may cross before it: the two sides
    expected packets of different sizes."""
    boundary, _ = boundaries("bf16", backward={"codec": "bf16"})
    x = torch.randn(4, 64)
    for number, boundary.dependence in enumerate([(True, False), (True,)]):
        boundary.forward.layout_of([x] * (2 - number), boundary.forward.message_id(0, number))
    assert boundary.backward.layout_of([x, x], boundary.backward.message_id(0, 0)).exempt == ["", MASK]
    assert boundary.backward.layout_of([x], boundary.backward.message_id(0, 1)).exempt == [""]


def test_a_lone_mask_is_sent_uncompressed():
    """It was compressed, as the only float tensor of its message: its finfo.min arrived as nan."""
    sender, receiver = boundaries({"name": "quantize", "bits": 8})
    mask = torch.zeros(4, 1, 32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), torch.finfo().min)
    now = MessageId(2)
    assert sender.forward.layout_of([mask], now).exempt == [""]  # before anything is known
    sender.dependence = receiver.dependence = (False,)
    packet, _, message = sender.forward.encode([mask], now)
    assert message.exempt == [MASK]
    (arrived,) = receiver.forward.decode(packet, receiver.forward.layout_of([mask], now), now)
    assert torch.equal(arrived, mask)


def test_both_packets_come_back_and_are_counted():
    sender, receiver = boundaries("lossless")
    x, message_id = torch.randn(4, 64), sender.forward.message_id(0, 0)
    packet, rest, layout = sender.forward.encode([x], message_id)
    sent = sender.forward.sent
    assert (sent.messages, sent.raw_bytes) == (1, 1024) and sent.latest is layout
    assert sent.wire_bytes == packet.nbytes + rest.nbytes
    message = receiver.forward.layout_of([x], message_id)
    assert torch.equal(receiver.forward.decode(packet, message, message_id, lambda nbytes: rest)[0], x)
    line = refusal(receiver.forward.decode, packet, message, message_id)
    assert line.startswith("boundary 2, forward: no packet follows, expected one of")
    late = sender.forward.encode([x], sender.forward.message_id(1, 0)).extra
    line = refusal(receiver.forward.decode, packet, message, message_id, lambda nbytes: late)
    assert line.endswith("its step is 1, expected 0")


@pytest.mark.parametrize("supports_out", [True, False])
def test_a_codec_that_breaks_its_word_is_named_before_anything_is_sent(supports_out, monkeypatch):
    sender, _ = boundaries("fp16")
    codec = sender.forward.codec
    whole = codec.encode
    called = "encode_into" if supports_out else "encode"  # encode_into is encode where a codec supports out
    if not supports_out:
        monkeypatch.setattr(type(codec), "encode_into", Codec.encode_into)
    for broken, output in (
        (lambda values, scale: (values,), "1 payload tensors came, the layout has 2"),
        (lambda values, scale: (values.float(), scale), "payload of .* torch.float32 came"),
    ):
        monkeypatch.setattr(codec, called, lambda x, ctx, out=None: broken(*whole(x, ctx)))
        with pytest.raises(CompressionError, match=output):
            sender.forward.encode([torch.randn(4, 64)], sender.forward.message_id(0, 0))


def test_a_message_header_and_context_share_their_fields():
    boundary, _ = boundaries("bf16", seed=9)
    message_id = boundary.backward.message_id(5, 3, training=False)
    assert message_id == MessageId(2, "backward", 5, 3, False)
    shared = vars(message_id)
    boundary.begin_step(loss_scale=256.0)
    ctx = boundary.context(message_id, position=1)
    assert shared.items() <= vars(ctx).items() and (ctx.position, ctx.seed, ctx.loss_scale) == (1, 9, 256.0)
    ctx.memory["basis"] = torch.ones(1)
    assert not boundary.memory[1], "evaluation leaves nothing"
    assert boundary.context(boundary.forward.message_id(5, 3), 1).loss_scale == 1.0
    assert all(issubclass(each, MessageId) for each in (Context, Header))


@pytest.mark.parametrize("codec", ["none", "bf16", "quantize"])
def test_what_arrives_is_a_tensor_of_its_own_each_time(codec):
    """The views of a packet are kept with its memory: one with a gradient must not come again."""
    sender, receiver = (side.forward for side in boundaries(codec))
    packet, arrived = None, []

    def memory(nbytes):
        return Packet(torch.zeros(nbytes, dtype=torch.uint8)) if packet is None else packet

    for number in range(3):
        x = torch.full((4, 128), float(number)).bfloat16(), torch.arange(7)
        message_id = sender.message_id(0, number)
        packet, _, layout = sender.encode(x, message_id, memory)
        tensors = receiver.decode(packet, layout, message_id)
        assert torch.equal(tensors[0], x[0]) and torch.equal(tensors[1], x[1])
        assert not tensors[0].requires_grad and tensors[0].grad is None
        tensors[0].requires_grad_().sum().backward()
        arrived += tensors
    assert len(set(map(id, arrived))) == len(arrived)
