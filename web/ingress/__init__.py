"""The ingress's side of the bus: requests out, replies in, who is there."""
