"""The scheduler's services around its core: membership, streams, metrics, snapshots, dead letters."""
