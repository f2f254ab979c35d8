"""Adapters in PEFT folders: what they adapt, whether they may be used, and the digest that they are known by."""
