"""Parsers of model output: reasoning and tool calls.

A parser is fed text piece by piece. Its output depends on the text alone, not on how the text was cut into pieces. A
stream that is resumed elsewhere therefore continues exactly where it was, by feeding the text again.
"""
