"""The scheduler actor: a pure core decides which tokens run in which blocks; the actor connects it to the bus."""
