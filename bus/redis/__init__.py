"""The bus over Redis Streams: commands, connections, leases, and what a lost answer may have meant."""
