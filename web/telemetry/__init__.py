"""The ingress's metrics and traces, and the load it reports to balancers."""
