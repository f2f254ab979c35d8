"""The tiny model shipped with Pagebus, and the code that trained it."""
