"""A registry builds what a JSON value describes, or says in one line why not."""

import pytest

from ds_compress import Codec, CompressionError, register
from ds_compress.registry import Named, Options, Registry


@pytest.mark.parametrize("choice", ["picky", {"name": "picky"}])
def test_an_option_that_must_be_given(choice):
    """By its name alone, such a codec of a user's own once ended in pydantic's error, of four lines."""
    things: Registry[Named] = Registry("thing", Named)

    @things.register("picky")
    class Picky(Named):
        class Options(Options):
            bits: int
            """There is no default."""

    with pytest.raises(CompressionError, match=r"^ds_compress\.thing\.bits: missing$"):
        things.build(choice, "ds_compress.thing")
    assert things.build({"name": "picky", "bits": 4}, "").options.bits == 4


def test_what_lacks_a_part_of_the_contract_is_not_registered():
    """It once was, and ended in a TypeError of Python's own when a config named it."""
    with pytest.raises(CompressionError, match=r"^codec 'half': .*Half does not define decode, layout$"):

        @register("half")
        class Half(Codec):
            """Encodes alone."""

            def encode(self, x, ctx):
                return (x,)
