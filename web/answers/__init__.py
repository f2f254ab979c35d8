"""Answers as clients read them: whole or as events, and for who comes back."""
