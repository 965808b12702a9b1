"""Runs the system in virtual time: the clock, and models of the work that it schedules."""
