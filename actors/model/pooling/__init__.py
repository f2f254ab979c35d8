"""Models that pool instead of generating: encoders, embedding models, classifiers, and what their files say of them."""
