"""In which order a stage works, and how long a step takes, without running it."""
