"""Move packets between ranks: over sockets or NCCL, through host memory, on streams of a device."""
