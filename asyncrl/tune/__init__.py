"""Finds the schedule that a config's own costs ask for, on the simulator."""
