"""The package has every module of its sources, wherever it is installed."""

from pathlib import Path

import imbrex

SOURCES = Path(__file__).parents[1] / "imbrex"


def test_every_module_is_installed():
    installed = Path(imbrex.__file__).parent
    missing = [str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if not (installed / path.relative_to(SOURCES)).exists()]
    assert missing == []
