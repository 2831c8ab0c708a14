"""What `__getattr__` of this package finds, for editors and mypy."""

from ds_compress.codec import Codec as Codec
from ds_compress.codec import CodecOptions as CodecOptions
from ds_compress.codec import Context as Context
from ds_compress.codec import TensorSpec as TensorSpec
from ds_compress.codec import build as build
from ds_compress.codec import register as register
from ds_compress.config import Config as Config
from ds_compress.engine.attach import attach as attach
from ds_compress.errors import CompressionError as CompressionError
from ds_compress.feedback import Feedback as Feedback
from ds_compress.feedback import FeedbackCodec as FeedbackCodec
from ds_compress.feedback import register_feedback as register_feedback
from ds_compress.testing import check_codec as check_codec
from ds_compress.version import __version__ as __version__
