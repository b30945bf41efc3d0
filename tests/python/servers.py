"""Server processes, found as the system shows them."""

import os
from pathlib import Path


def servers_of(folder: Path) -> list[int]:
    """Process ids of servers whose job directory lies in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if b"psplus-server" in command.split(b"\0")[0] and os.fsencode(folder) in command:
            found.append(int(entry.name))
    return found
