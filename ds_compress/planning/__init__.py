"""Predict step times without running them, and choose settings and depth from that."""
