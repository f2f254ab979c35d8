"""From logits to tokens and log probabilities, within grammars."""
