"""Every kind of pipeline that DeepSpeed can run, to train as stock and with ds_compress."""
