"""Small steps of loops as LLVM IR. Read runs.py first."""
