"""Inner loops of the codecs: bit packing and what else is worth tuning per device."""
