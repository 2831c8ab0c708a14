"""Counters and measurements, gathered and written where DeepSpeed's monitor writes."""
