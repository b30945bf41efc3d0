"""Starting workers: from a notebook or a script by `psplus.launch`."""

from psplus.launcher.spawn import launch

__all__ = ["launch"]
