"""One replica, purely: its slots and blocks, the plans made of them, the results taken in."""
