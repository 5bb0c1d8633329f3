"""The rules, a family a file; each has RULES and find(model, repository)."""
