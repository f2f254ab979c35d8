"""A private Redis server: starts it, repairs its append-only file after a crash, and keeps that file small."""
