"""Arithmetic of the codecs, free of options, specs and contexts: plain torch is the specification of any
faster version."""
