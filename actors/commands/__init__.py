"""The `pagebus` command: its parser, `serve`, and commands that have no folder of their own."""
