"""Storage for clients: files and batches on disk, responses on the bus, and their quotas."""
