"""The ingress's side of the bus: sends requests, receives replies, tracks members."""
