"""How the draft head, and small models, learn: data, targets, losses, steps and their commands."""
