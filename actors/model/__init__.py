"""A model without its weights: configuration, tokenizer, block hashes and grammars."""
