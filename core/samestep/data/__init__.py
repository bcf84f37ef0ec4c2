"""Find, download, verify and read datasets; divide samples into batches by their numbers of tokens."""
