"""Routes of the service itself: models, health, metrics, the page and operators' commands."""
