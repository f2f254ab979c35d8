"""What the page is shown: the scheduler's state, figures and their history, and who is there.

It works while it is watched, except for the history, which takes a sample every two seconds."""
