"""AQ-SGD: messages are changes against the last message of the same sample, which both sides keep."""
