"""The tiny model that is shipped, and how it was trained."""
