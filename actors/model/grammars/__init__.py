"""Parts of grammars in llguidance's Lark: marks that may be tokens, reasoning, structural tags."""
