"""One replica as pure state: its slots and blocks, the plans built from them, and the results applied to them."""
