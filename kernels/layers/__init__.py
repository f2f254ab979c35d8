"""Operations between attention and products: norms, embeddings, rotation and cache writes."""
