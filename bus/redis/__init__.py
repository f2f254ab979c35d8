"""The bus over Redis Streams: commands, connections, leases, and recovery from lost answers."""
