"""The rules: values and pure decisions, standard library only."""
