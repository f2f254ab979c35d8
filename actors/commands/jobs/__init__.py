"""`pagebus job` and `pagebus run-batch`: files of requests onto the stream of jobs, results into files."""
