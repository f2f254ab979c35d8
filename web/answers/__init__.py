"""Answers to clients: whole or as event streams, also for clients that reconnect."""
