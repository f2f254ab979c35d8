"""Routes of the service itself: models, health, metrics, the page, operator commands."""
