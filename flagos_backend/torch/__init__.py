"""The public names of the PyTorch front end, which is frontends/torch. Importing this package imports nothing else."""
