"""The model without its weights: configuration, tokenizer, block hashes, grammars."""
