"""Request bodies: one reader per topic, and their translation into bus messages."""
