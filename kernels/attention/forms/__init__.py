"""Forms of decode attention: in which tiles, and how cut, the rows of a step are read by heads like a model's."""
