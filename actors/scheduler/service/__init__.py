"""The scheduler's IO beside its core: membership, streams, metrics, observers and dead letters."""
