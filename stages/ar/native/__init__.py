"""Decoding on a CPU in C: one call computes a step's answers, where PyTorch would dispatch thousands of small operations."""
