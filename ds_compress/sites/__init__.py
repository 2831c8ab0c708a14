"""Replicas that are launched apart, at sites behind slow links: they exchange weights every H steps."""
