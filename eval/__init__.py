"""What methods cost in accuracy, measured."""
