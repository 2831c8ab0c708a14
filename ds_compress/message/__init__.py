"""What one message goes through: packet, channel, counters and meters."""
