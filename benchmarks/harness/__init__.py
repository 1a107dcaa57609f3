"""Gates, timer, machine rates, record of results, and the tensors of cases."""
