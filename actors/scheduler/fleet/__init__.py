"""All replicas together: their load and room as arrays, their roles, and who takes over sequences of others."""
