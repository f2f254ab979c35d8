"""Bodies of requests, one reader per topic, and what they become on the bus."""
