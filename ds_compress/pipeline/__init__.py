"""Where DeepSpeed is entered: its engine gets a mixin, its instructions send and receive packets."""
