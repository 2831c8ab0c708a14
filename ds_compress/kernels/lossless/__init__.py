"""Byte shuffle."""
