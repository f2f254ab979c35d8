"""The ``pagebus`` command: its parser, ``serve``, and the commands without a folder of their own."""
