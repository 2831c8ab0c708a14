"""Feedbacks: state that wraps a codec and lives as long as training."""

from ds_compress.feedback import ef, ef21, mixed  # noqa: F401  (registers them)
from ds_compress.feedback.aqsgd import aqsgd  # noqa: F401
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, NoFeedback, register_feedback

__all__ = ["FEEDBACKS", "Feedback", "FeedbackCodec", "NoFeedback", "register_feedback"]
