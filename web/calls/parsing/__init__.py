"""Parsers that find reasoning and tool calls in a model's text.

A parser reads a text piece by piece. Its output after some text depends only on that text, not on how it was divided
into pieces. A stream that is resumed elsewhere therefore continues exactly where it was, by reading the text again.
"""
