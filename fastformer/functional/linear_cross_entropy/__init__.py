"""The last linear layer and the loss in one, whose logits never exist all at once."""
