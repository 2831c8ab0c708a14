"""The release, in a module of its own: reading it imports nothing."""

__version__ = "0.4.0.dev0"
