"""Training engines (DDP, FSDP2, DeepSpeed) with one interface, `base.Engine`, built from a resolved layout."""
