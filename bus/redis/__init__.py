"""The bus over Redis Streams: commands, connections, leases, and commands with unknown outcome."""
