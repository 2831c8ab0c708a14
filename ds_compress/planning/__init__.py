"""How long a step takes, without running it."""
