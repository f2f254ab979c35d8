"""Data for the page: the scheduler's state, figures and their history, and the roster of actors.

It works only while a page is connected, except for the history, which takes a sample every two seconds.
"""
