"""Find, download, verify and read datasets."""
