"""The last linear layer and cross entropy in one op, whose logits never exist all at once."""
