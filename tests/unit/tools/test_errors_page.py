"""docs/errors.md is what the catalogues say, and no number names two errors."""

import re
from pathlib import Path

from flagos_backend import errors
from flagos_backend.errors import CATALOGUE
from plugin_abi.errors import RefusalCode
from tools import errors_page


def test_the_page_is_written() -> None:
    assert errors_page.PAGE.read_text(encoding="utf-8") == errors_page.page(), "python -m tools.errors_page"


def test_every_class_is_on_it() -> None:
    package = Path(errors.__file__).parent
    declared = [
        n for path in package.rglob("*.py") for n in re.findall(r"^    number = (\d+)$", path.read_text(), re.M)
    ]
    assert sorted(declared) == sorted(re.findall(r"^#### FLAGOS-(\d{3}) ", errors_page.page(), re.M))


def test_a_number_names_one_error() -> None:
    numbers = re.findall(r"^#### FLAGOS-(\d+) ", errors_page.page(), re.M)
    assert len(numbers) == len(set(numbers)) == len(CATALOGUE) + len(RefusalCode.__members__)
    assert all(code.meaning and code.cure for code in RefusalCode)
