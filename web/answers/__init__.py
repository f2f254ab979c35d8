"""Answers to clients: whole or as events, resumable after a lost connection."""
