"""The detokenizer actor: turns token ids into text, finds stop strings, and adds up scores."""
