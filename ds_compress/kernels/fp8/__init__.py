"""8-bit floats with a scale per group."""
