"""Request bodies: one reader per topic, and the messages built from them."""
