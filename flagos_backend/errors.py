"""The backend's catalogue of errors: class, status code, message template (fact, place, cure)."""
