"""LoRA adapters: fine-tuned changes of layers that several requests of one batch apply differently."""
