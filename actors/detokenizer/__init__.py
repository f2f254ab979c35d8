"""The detokenizer actor: token ids become text, stop strings and scores."""
