"""The engines: DDP, FSDP2 and DeepSpeed under one interface (`base.Engine`), built from a resolved layout."""
