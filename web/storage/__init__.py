"""Files of clients and the batches that read them: what ingresses write and jobs actors work on, on one disk."""
