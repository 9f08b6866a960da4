"""Programs on accelerators: how plans are divided, recorded as graphs and replayed."""
