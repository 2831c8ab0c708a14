"""State of the channels beside DeepSpeed's checkpoint."""
