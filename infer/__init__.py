"""How the model generates, plainly and speculatively, and how we know that nothing is lost."""
