"""What stands before the first layer."""
