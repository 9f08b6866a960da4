"""Public: what became of each compiled graph."""

from flagos_backend.frontends.torch.compile.report import GraphReport, clear, reports

__all__ = ["GraphReport", "clear", "reports"]
