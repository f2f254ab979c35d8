"""The data of the page: the scheduler's state, figures with their history, the members, and incidents.

It runs only while a page is open, except for the history, which takes a sample every two seconds, and for incidents,
which are found in the leases that the ingress reads anyway.
"""
