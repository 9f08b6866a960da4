"""Bytes that nobody vouches for, thrown at everything that reads such: the loader, the importer, kept files."""
