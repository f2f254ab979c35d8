"""What lies between attention and products: norms, embeddings, rotation and the cache's writes."""
