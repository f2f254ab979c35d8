"""The tokenizer actor: turns chats and texts into token ids, and validates grammars."""
