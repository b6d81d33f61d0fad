"""Scheduling: the scheduler, the queues that it admits from, and the steps that it plans, times and has in flight."""
