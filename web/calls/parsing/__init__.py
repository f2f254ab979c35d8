"""What a model's text says besides content: reasoning, calls of tools.

A parser is fed a text piece by piece. What it has given out after some text depends on that text alone, not on how it
came in pieces: so a stream that is resumed elsewhere goes on exactly where it was, by feeding the text again.
"""
