"""The scheduler actor: a pure core decides what runs in which blocks; the actor around it does the IO."""
