"""Instruments: verify, time, profile and count, each candidate in a process of its own, and the statistic of it all."""
