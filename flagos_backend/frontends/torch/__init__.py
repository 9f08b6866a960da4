"""The PyTorch front end. Importing this package imports nothing else."""
