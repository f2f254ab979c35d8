"""Grammars in llguidance's Lark: literals, reasoning marks, structural tags."""
