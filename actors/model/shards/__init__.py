"""The part of a model that one rank of a group holds: its heads, its widths, and what it cuts out of each tensor."""
