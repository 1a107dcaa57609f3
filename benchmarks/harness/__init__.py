"""How a race is held: gates, clock, floors, the record of it, and what cases are made of."""
