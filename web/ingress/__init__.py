"""The ingress's side of the bus: requests out, replies in, and a view of the live actors."""
