"""The system under test and the load on it: deployments, shapes of models, requests, clients."""
