"""Adapters for other APIs: Anthropic's Messages, OpenAI's Responses, and tokens in and out."""
