"""What the scheduler tells and reads beside its core: members, streams, figures, failures."""
