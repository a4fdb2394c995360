"""Evaluation of the accuracy cost of methods."""
