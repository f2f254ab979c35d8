"""Launch shapes of experts: those there are, what each needs and should take, and which were measured."""
