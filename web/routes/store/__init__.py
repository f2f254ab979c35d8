"""Routes of files, and of batches that read them."""
