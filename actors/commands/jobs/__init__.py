"""``pagebus job`` and ``pagebus run-batch``: submit files of requests as jobs and collect the results."""
