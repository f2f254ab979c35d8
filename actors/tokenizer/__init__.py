"""The tokenizer actor: chat templates and texts become token ids; grammars are tried."""
