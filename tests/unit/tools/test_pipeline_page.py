"""docs/pipeline.md is what the declaration says."""

from tools import pipeline_page


def test_page_is_current() -> None:
    assert pipeline_page.PAGE.read_text(encoding="utf-8") == pipeline_page.page(), "python -m tools.pipeline_page"
