"""Arithmetic on groups of values, free of options, specs and contexts: plain torch, and the specification of any
faster version."""
