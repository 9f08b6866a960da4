"""Graph bytes to IR and back: the schema, the importer and the exporter."""

from flagos_backend.importer.export import export_module
from flagos_backend.importer.graph import import_module
from flagos_backend.importer.program import Program, import_program

__all__ = ["Program", "export_module", "import_module", "import_program"]
