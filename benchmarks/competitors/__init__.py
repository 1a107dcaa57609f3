"""The competitors of fastformer behind common arguments, and comparisons with them that cases share."""
