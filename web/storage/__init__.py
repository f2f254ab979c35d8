"""Storage for clients: files on disk, responses on the bus, and their quotas."""
