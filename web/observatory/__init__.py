"""The data of the page: the scheduler's state, figures with their history, and the members.

It runs only while a page is open, except for the history, which takes a sample every two seconds.
"""
