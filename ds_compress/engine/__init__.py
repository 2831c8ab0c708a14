"""What moves messages: DeepSpeed's engine gets a mixin, its instructions send and receive packets."""
