"""Find, download, verify and read datasets, and form batches of samples by their numbers of tokens."""
