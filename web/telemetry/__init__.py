"""The ingress's metrics and traces, and the load that it reports to load balancers."""
