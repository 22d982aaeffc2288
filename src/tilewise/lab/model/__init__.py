"""What can be said of a kernel without running it: the hardware's ceilings, occupancy, its build."""
