"""The scheduler actor: a pure core decides what runs in which blocks; the actor brings it news."""
