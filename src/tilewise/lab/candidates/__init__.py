"""Ways to compute attention, by name: `names` has them all; the others make some of them, or the tensors they get."""
