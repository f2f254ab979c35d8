"""The library's algorithms for dense products, of which the one that fills its rounds best is told to multiply."""
