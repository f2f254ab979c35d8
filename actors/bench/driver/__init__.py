"""The system under test and its load: deployments, model shapes, requests and clients."""
