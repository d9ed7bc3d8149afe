import logging
import os
from importlib.metadata import entry_points

logger = logging.getLogger(__name__)
_loaded = False


def load_plugins():
    """Once a process. What fails is logged and left out."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    allowed = os.environ.get("SGLANG_PLUGINS")
    found = entry_points()
    group = found.select(group="sglang.srt.plugins") if hasattr(found, "select") else found.get("sglang.srt.plugins", [])
    for point in group:
        if allowed and point.name not in allowed.split(","):
            continue
        try:
            point.load()()
        except Exception:
            logger.exception("Failed to execute general plugin: %s", point.name)
