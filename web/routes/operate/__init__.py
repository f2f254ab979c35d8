"""Routes of the service itself: models, health, metrics, the page, an operator's orders."""
