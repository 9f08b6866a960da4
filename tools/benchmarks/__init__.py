"""Benchmarks: floor, ours, peer and ratio from one run, with hardware, versions, command and date."""
