"""The disk tier of a replica: what is written to files and read back, beside its steps."""
