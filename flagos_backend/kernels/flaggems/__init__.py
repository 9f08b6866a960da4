"""FlagGems' kernels, called as functions: nothing is registered with torch. Chosen by kernels/choice.py."""
