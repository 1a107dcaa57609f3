"""What people would use instead of fastformer, each behind the arguments that ours take."""
