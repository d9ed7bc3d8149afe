import os
from importlib.metadata import entry_points

plugins_loaded = False


def load_general_plugins():
    """Once a process. Plug-ins that cannot be loaded are left out; one that fails when it is called is not caught."""
    global plugins_loaded
    if plugins_loaded:
        return
    plugins_loaded = True
    allowed = os.environ.get("VLLM_PLUGINS")
    found = entry_points()
    group = found.select(group="vllm.general_plugins") if hasattr(found, "select") else found.get("vllm.general_plugins", [])
    for point in group:
        if allowed is None or point.name in allowed.split(","):
            point.load()()
