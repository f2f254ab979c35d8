"""GGUF files: a model's configuration, its tokenizer, and where its weights lie, all in one."""
