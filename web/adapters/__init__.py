"""Adapters: Anthropic's Messages, OpenAI's Responses and token ids, translated to chats and back."""
