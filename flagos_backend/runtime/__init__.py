"""Runtime: compiled programs (plan.py) and the bridge that native code calls. Last stage of the pipeline."""
