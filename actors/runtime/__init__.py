"""The life of actors and their processes: leases, readiness, health, supervision."""
