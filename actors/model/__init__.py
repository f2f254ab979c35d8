"""What a model is without its weights: configuration, tokenizer, hashes of blocks, grammars."""
